"""Trained models against transformers, token by token: 20 stories of 128 tokens each, greedy, fp32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine, GenerationResult

N_TOKENS = 128
OPENINGS = [
    "Once upon a time",
    "Once upon a time, there was a little girl named Lily.",
    "One day, a boy named Tim",
    "The big dog",
    "Tom and his mom went to the store.",
    "There was a red ball in the park. It",
    '"Can I play with you?" asked the cat.',
    "A small bird sat in a tree and sang",
    "Every night, the moon",
    "Sara was sad because",
    "In the forest there lived an old bear who loved honey.",
    "The train was late.",
    "My friend has a blue car",
    "It was raining, so Anna and Ben stayed inside.\n",
    "A frog jumped into the water and",
    "Mia found a shiny key under her bed.",
    "The teacher smiled and said,",
    "Long ago, a king had three sons",
    "Max wanted to fly like a",
    "At the end of the day,",
]


@pytest.fixture(scope="module", params=["stories260k", "demo"])
def folder(request: pytest.FixtureRequest) -> Path:
    model: Path = request.getfixturevalue(request.param)
    return model


@pytest.fixture(scope="module")
def stories(folder: Path) -> list[GenerationResult]:
    with Engine.from_pretrained(folder, quantizer="none", threads=1) as engine:
        return engine.generate(OPENINGS, max_new_tokens=N_TOKENS)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Any, Any]:
    """transformers' model and tokenizer."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.sample(1)
def test_each_token_is_the_one_transformers_would_choose(
    reference: tuple[Any, Any], stories: list[GenerationResult]
) -> None:
    """One pass over the whole story tells what generate would have chosen at each step, given the tokens before."""
    model, tokenizer = reference
    for opening, story in zip(OPENINGS, stories, strict=True):
        prompt = tokenizer(opening)["input_ids"]
        ids = [*prompt, *story.token_ids]
        with torch.no_grad():
            chosen = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert story.token_ids == tuple(chosen[len(prompt) - 1 : -1])
        assert story.n_prompt_tokens == len(prompt)
        ends = set(torch.tensor(model.generation_config.eos_token_id).flatten().tolist())
        assert story.n_generated_tokens == N_TOKENS or story.token_ids[-1] in ends
        assert not ends & set(story.token_ids[:-1])


@pytest.mark.sample(0)
def test_text_and_tokens_are_those_of_transformers_generate(
    reference: tuple[Any, Any], stories: list[GenerationResult], folder: Path
) -> None:
    model, tokenizer = reference
    n_compared = 3 if model.num_parameters() > 1e6 else len(OPENINGS)  # the demo model's would take half a minute
    for opening, story in list(zip(OPENINGS, stories, strict=True))[:n_compared]:
        inputs = tokenizer(opening, return_tensors="pt", return_token_type_ids=False)
        theirs = model.generate(**inputs, max_new_tokens=N_TOKENS, do_sample=False)[0].tolist()
        n_prompt = inputs["input_ids"].shape[1]
        assert story.token_ids == tuple(theirs[n_prompt:])
        whole, before = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (theirs, theirs[:n_prompt]))
        assert story.text == whole[len(before) :]


def test_the_stories_are_in_english(stories: list[GenerationResult]) -> None:
    words = " ".join(story.text for story in stories).lower().split()
    assert sum(word in {"the", "a", "and", "to", "was", "he", "she", "it"} for word in words) > 0.15 * len(words)
