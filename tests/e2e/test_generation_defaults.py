"""What a model's files ask of generating: done as transformers does it, or said once at opening, never dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_ee import Engine, SamplingParams, UsageError
from hetero_ee.options import generation_keys
from tests.bad_models import GENERATION
from tests.conftest import PROMPT
from tests.families import edit_config

N_TOKENS = 12
# Keys that change even a greedy text, or its length, with values that do.
ASKED: dict[str, Any] = {
    "num_beams": 4,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": [[1]],
    "force_words_ids": [[5]],
    "guidance_scale": 1.5,
    "sequence_bias": [[[76], -10.0]],
    "encoder_repetition_penalty": 1.9,
    "encoder_no_repeat_ngram_size": 2,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5]],
    "min_length": 20,
    "min_new_tokens": 20,
    "max_length": 30,
    "max_time": 2.0,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": [3, 1.5],
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "token_healing": True,
    "watermarking_config": {"bias": 2.0},
}
SAMPLED = {"top_h": 0.4, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4}
# What files in the wild say without asking for anything.
NEUTRAL: dict[str, dict[str, Any]] = {
    "empty": {},
    "nulls": dict.fromkeys(generation_keys.ALL),
    "transformers' defaults of version 4": {
        **{"num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "no_repeat_ngram_size": 0, "min_length": 0},
        **{"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "typical_p": 1.0, "do_sample": True},
        **{"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "length_penalty": 1.0, "early_stopping": False},
        **{"remove_invalid_values": False, "token_healing": False, "guidance_scale": 1.0},
    },
    "the whole context": {"max_length": 600},
    "a length of its own": {"max_length": 30, "max_new_tokens": 4},
    "sampling that is off": SAMPLED,
    "what changes no text": {
        "use_cache": False,
        "prompt_lookup_num_tokens": 3,
        "chat_format": "chatml",
        "pad_token_id": 0,
    },
    "beams' settings without beams": {"early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.5},
}


class Notices(list[str]):
    """As progress: keeps the remarks."""

    def __call__(self, stage: str, done: int, in_all: int) -> None:
        if in_all == 0:
            self.append(stage)


def opened(folder: Path, **options: Any) -> tuple[Engine, Notices]:
    notices = Notices()
    return Engine.from_pretrained(folder, quantizer="none", threads=1, progress=notices, **options), notices


def notices_of(folder: Path, generation: dict[str, Any]) -> Notices:
    (folder / GENERATION).write_text(json.dumps(generation))
    engine, notices = opened(folder)
    engine.close()
    return notices


def test_every_key_that_changes_a_text_is_asked_about() -> None:
    assert ASKED.keys() | SAMPLED.keys() == generation_keys.ALL


@pytest.mark.parametrize("name", ASKED)
def test_a_key_that_is_not_offered_is_named_once(own_tiny: Path, name: str) -> None:
    [notice] = notices_of(own_tiny, {name: ASKED[name]})
    assert notice.startswith(f"generation_config.json asks for {name} {ASKED[name]!r}"), notice
    assert "the text may differ" in notice and notice.isprintable()


def test_several_are_named_in_one_sentence(own_tiny: Path) -> None:
    asked = {"no_repeat_ngram_size": 3, "num_beams": 4, "do_sample": True, "typical_p": 0.9}
    assert notices_of(own_tiny, asked) == [
        "generation_config.json asks for num_beams 4, no_repeat_ngram_size 3 and typical_p 0.9, which hetero_ee does "
        "not do; the text may differ from that of transformers."
    ]


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_asks_for_nothing_is_not_mentioned(own_tiny: Path, name: str) -> None:
    assert notices_of(own_tiny, NEUTRAL[name]) == []


def test_a_value_from_elsewhere_is_shown_short_and_printable(own_tiny: Path) -> None:
    [notice] = notices_of(own_tiny, {"num_beams": "\x1b]0;x\x07" * 50, "bad_words_ids": [[1] * 5000]})
    assert notice.isprintable() and len(notice) < 300


@torch.no_grad()
def theirs(folder: Path, ids: list[int]) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([ids])
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=N_TOKENS)[0]
    return list(text[len(ids) :].tolist())


def ours(folder: Path) -> tuple[list[int], list[int], Notices]:
    """Ids of the prompt and of the text."""
    engine, notices = opened(folder)
    with engine:
        return engine._prompt_ids(PROMPT), list(engine.generate(PROMPT, max_new_tokens=N_TOKENS).token_ids), notices


@pytest.mark.parametrize("has_file", [True, False])
def test_without_the_file_fields_of_config_json_count_as_for_transformers(own_tiny: Path, has_file: bool) -> None:
    plain = ours(own_tiny)[1]
    edit_config(own_tiny, repetition_penalty=3.0)
    (own_tiny / GENERATION).unlink(missing_ok=True)
    if has_file:
        (own_tiny / GENERATION).write_text("{}")
    prompt, text, _ = ours(own_tiny)
    assert text == theirs(own_tiny, prompt)
    assert (text == plain) == has_file


def test_the_notice_names_the_file_that_asks(own_tiny: Path) -> None:
    (own_tiny / GENERATION).unlink(missing_ok=True)
    edit_config(own_tiny, no_repeat_ngram_size=2)
    *_, [notice] = ours(own_tiny)
    assert notice.startswith("config.json asks for no_repeat_ngram_size 2")


@pytest.mark.parametrize("asked", [{"num_beams": 4}, {"do_sample": True, "typical_p": 0.5}, {"max_length": 9}])
def test_a_configuration_given_by_the_caller_is_done_or_refused(asked: dict[str, Any]) -> None:
    for configuration in (asked, transformers.GenerationConfig(**asked)):
        with pytest.raises(UsageError, match="which is not offered; leave it out"):
            SamplingParams.from_hf(configuration)


def test_a_context_beyond_training_is_said_and_allowed(tiny: Path) -> None:
    engine, notices = opened(tiny, context_tokens=601)
    engine.close()
    assert notices == [
        "the context of 601 tokens is longer than the 600 this model was trained on; quality may degrade beyond them."
    ]
    engine, notices = opened(tiny, context_tokens=600)
    engine.close()
    assert notices == []
