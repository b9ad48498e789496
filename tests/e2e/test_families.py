"""The executor in fp32 against transformers, family by family, on random checkpoints read from disk."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.ops.torch_ops import BatchedTorchOps, TorchOps
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.families import FAMILIES, edit_config, random_model, save_checkpoint

TOLERANCE = 1e-4  # of the largest logit
N_DECODED = 64
PROMPT = [1, 17, 130, 3, 99, 42, 42, 7, 12, 77, 101, 5, 64]  # longer than the windows of 7, 9 and 11


def executor_of(folder: Path, ops: TorchOps | None = None) -> Executor:
    spec = read_spec(folder)
    return ReferenceExecutor(spec, load_dense(Checkpoint(folder, spec)), spec.max_context_tokens, ops)


def greedy(executor: Executor, prompts: list[list[int]], n_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens of each prompt, decoded together, and each step's logits (prompts, vocab)."""
    for sequence in range(len(prompts)):
        executor.cache.open(sequence)
    batch = Batch.joined([Batch.of_sequence(s, 0, prompt) for s, prompt in enumerate(prompts)])
    wanted = [sum(map(len, prompts[: s + 1])) - 1 for s in range(len(prompts))]
    tokens: list[list[int]] = [[] for _ in prompts]
    steps = []
    for _ in range(n_tokens):
        steps.append(executor.logits(batch, wanted))
        for sequence, logits in enumerate(steps[-1]):
            tokens[sequence].append(int(logits.argmax()))
        positions = [executor.cache.length(s) for s in range(len(prompts))]
        batch = Batch(tuple(t[-1] for t in tokens), tuple(range(len(prompts))), tuple(positions))
        wanted = list(range(len(prompts)))
    return tokens, steps


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = random_model(request.param)
    return model, save_checkpoint(model, tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], n_tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers without a cache: tokens and logits (n_tokens, vocab), the plainest path there is."""
    ids, steps = list(prompt), []
    for _ in range(n_tokens):
        steps.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(steps[-1].argmax()))
    return ids[len(prompt) :], torch.stack(steps)


def test_prefill_logits_match_transformers_at_every_position(family: tuple[Any, Path]) -> None:
    model, folder = family
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for ops in (TorchOps(), BatchedTorchOps()):
        executor = executor_of(folder, ops)
        executor.cache.open(0)
        logits = executor.logits(Batch.of_sequence(0, 0, PROMPT), range(len(PROMPT)))
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_decoded_tokens_and_logits_match_transformers(family: tuple[Any, Path]) -> None:
    model, folder = family
    expected_tokens, expected = reference_greedy(model, PROMPT, N_DECODED)
    tokens, steps = greedy(executor_of(folder), [PROMPT], N_DECODED)
    assert tokens[0] == expected_tokens
    assert (torch.cat(steps) - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_a_ragged_batch_gives_each_prompt_the_bits_it_has_alone(family: tuple[Any, Path]) -> None:
    _, folder = family
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:9]]
    together, batched_steps = greedy(executor_of(folder), prompts, 24)
    for sequence, prompt in enumerate(prompts):
        alone, steps = greedy(executor_of(folder), [prompt], 24)
        assert together[sequence] == alone[0]
        for batched, single in zip(batched_steps, steps, strict=True):
            assert torch.equal(batched[sequence], single[0])


def test_prefill_in_chunks_gives_the_bits_of_one_pass(family: tuple[Any, Path]) -> None:
    _, folder = family
    whole, chunked = executor_of(folder), executor_of(folder)
    for executor in (whole, chunked):
        executor.cache.open(0)
    expected = whole.logits(Batch.of_sequence(0, 0, PROMPT), [len(PROMPT) - 1])
    chunked.logits(Batch.of_sequence(0, 0, PROMPT[:5]), [4])
    assert torch.equal(chunked.logits(Batch.of_sequence(0, 5, PROMPT[5:]), [len(PROMPT) - 6]), expected)


def test_truncating_rolls_back_exactly(family: tuple[Any, Path]) -> None:
    _, folder = family
    executor = executor_of(folder)
    executor.cache.open(0)
    executor.logits(Batch.of_sequence(0, 0, PROMPT), [0])
    expected = executor.logits(Batch.of_sequence(0, len(PROMPT), [9]), [0])
    executor.logits(Batch.of_sequence(0, len(PROMPT) + 1, [8, 7, 6]), [2])
    executor.cache.truncate(0, len(PROMPT))
    assert torch.equal(executor.logits(Batch.of_sequence(0, len(PROMPT), [9]), [0]), expected)


@pytest.mark.parametrize(
    ("name", "n_prompt", "context_tokens"),
    [
        ("llama-dynamic-rope", 150, 160),  # inside the original context
        ("llama-dynamic-rope", 161, 161),
        ("llama-dynamic-rope", 400, 400),  # transformers stretches by the prompt: one that fills the context
        ("phi3-longrope", 160, 160),
        ("phi3-longrope", 161, 640),
        ("phi3-longrope", 400, 640),
    ],
)
def test_a_longer_context_stretches_positions_as_transformers_stretches_a_prompts(
    name: str, n_prompt: int, context_tokens: int, tmp_path: Path
) -> None:
    model = random_model(name)
    spec = read_spec(save_checkpoint(model, tmp_path))
    prompt = (PROMPT * 31)[:n_prompt]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    weights = load_dense(Checkpoint(tmp_path, spec))
    found = []
    for length in (context_tokens, 3 * context_tokens):
        executor = ReferenceExecutor(spec, weights, length, BatchedTorchOps())
        executor.cache.open(0)
        found.append(executor.logits(Batch.of_sequence(0, 0, prompt), range(n_prompt)))
    assert (found[0] - expected).abs().max() <= TOLERANCE * expected.abs().max()
    is_stretched_more = name.startswith("llama") or context_tokens == 160  # longrope has two sets of factors
    assert (bool((found[1] - expected).abs().max() > 0.01 * expected.abs().max())) == is_stretched_more


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("place", ["of its own", "in rope_parameters"])
def test_a_part_of_the_features_turns_only_where_it_does_for_transformers(
    name: str, place: str, tmp_path: Path
) -> None:
    """Of these families only Phi-3 heeds partial_rotary_factor."""
    import transformers

    save_checkpoint(random_model(name), tmp_path)
    whole = read_spec(tmp_path).rope
    part = {"partial_rotary_factor": 0.5}
    if place == "in rope_parameters":
        edit_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0} | part)
    else:
        edit_config(tmp_path, rope_parameters=None, **part)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected_tokens, expected = reference_greedy(model, PROMPT, N_DECODED)
    tokens, steps = greedy(executor_of(tmp_path), [PROMPT], N_DECODED)
    assert tokens[0] == expected_tokens
    assert (torch.cat(steps) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    spec = read_spec(tmp_path)
    assert whole is not None and spec.rope is not None
    assert (spec.rope.n_features == whole.n_features) == (name != "phi3")


def test_prosparse_matches_a_llama_whose_activation_has_a_threshold(tmp_path: Path) -> None:
    """transformers has no such class, so its Llama gets the activation of arXiv 2402.13516: x from 0.6 on, else 0."""
    model = random_model("llama-relu")
    save_checkpoint(model, tmp_path)
    names = {"architectures": ["SparseLlamaForCausalLM"], "model_type": "sparsellama"}
    edit_config(tmp_path, **names, hidden_act="fatrelu", hidden_act_param=0.6)
    plain_tokens, _ = reference_greedy(model, PROMPT, N_DECODED)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Threshold(0.6, 0.0)
    expected_tokens, expected = reference_greedy(model, PROMPT, N_DECODED)
    tokens, steps = greedy(executor_of(tmp_path), [PROMPT], N_DECODED)
    assert tokens[0] == expected_tokens
    assert (torch.cat(steps) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert expected_tokens != plain_tokens  # the threshold matters here
