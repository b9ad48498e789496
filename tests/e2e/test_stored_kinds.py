"""Executors over caches of fp16 and int8: exact among themselves, and as near to fp32 as the rounding allows."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.e2e.test_cpu_executor import INT8_ACTIVATIONS
from tests.e2e.test_families import PROMPT, greedy
from tests.executor_support import Model, executor_for, hidden_alone, model_of, on_kernels, reference

CASES = [
    (family, weights, kind)
    for family in ("llama", "llama-gelu", "mistral", "opt")
    for weights in ("fp32", "int4")
    for kind in ("fp16", "int8")
]
ROUNDING = {"fp16": 1e-6, "int8": 2e-3}  # normalised squared error of logits after 3 layers of random weights
MEAN_KL = {"fp16": 1e-6, "int8": 1e-3}  # nats a token against an fp32 cache, of the trained demo model
TEXT = "Once upon a time there was a small robot who wanted to learn how to paint. Every morning it went to the river."


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, str, str]:
    family, weights, kind = request.param
    return model_of(family, weights, tmp_path_factory.mktemp(family)), weights, kind


@pytest.fixture
def executor(case: tuple[Model, str, str]) -> Iterator[Executor]:
    made = executor_for(*case)
    yield made
    made.cache.check()
    made.close()


@pytest.mark.sample(1)
def test_a_row_has_the_same_bits_in_every_batch_and_chunk(executor: Executor, case: tuple[Model, str, str]) -> None:
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:9]]
    together, batched_steps = greedy(executor, prompts, 8)
    for sequence, prompt in enumerate(prompts):
        alone, steps = greedy(executor_for(*case), [prompt], 8)
        assert together[sequence] == alone[0]
        for batched, single in zip(batched_steps, steps, strict=True):
            assert torch.equal(batched[sequence], single[0])
    chunked = executor.cache.open_new()
    executor.hidden(Batch.of_sequence(chunked, 0, PROMPT[:5]))
    last = executor.logits(Batch.of_sequence(chunked, 5, PROMPT[5:]), [len(PROMPT) - 6])
    assert torch.equal(last[0], batched_steps[0][0])


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_a_team_changes_no_bit(kind: str, tmp_path: Path) -> None:
    model = model_of("llama", "int4", tmp_path)
    teams = [on_kernels(model, kind, threads) for threads in (1, 3)]
    alone, shared = (hidden_alone(executor, PROMPT * 6) for executor in teams)
    for executor in teams:
        executor.close()
    assert torch.equal(alone, shared)


@pytest.mark.sample(5)
def test_truncating_rolls_back_exactly(executor: Executor) -> None:
    expected = hidden_alone(executor, [*PROMPT, 9])
    sequence = executor.cache.open_new()
    executor.hidden(Batch.of_sequence(sequence, 0, [*PROMPT[:6], 50, 51, 52, 53]))
    executor.run(Batch.of_sequence(sequence, 10, [60, 61]), None, range(1))
    executor.cache.truncate(sequence, 6)
    assert torch.equal(executor.hidden(Batch.of_sequence(sequence, 6, [*PROMPT[6:], 9])), expected[6:])


@pytest.mark.sample(1)
def test_logits_differ_by_the_rounding_alone(case: tuple[Model, str, str]) -> None:
    """From the same executor over an fp32 cache; and the kernels from the reference over the same kind of cache."""
    model, weights, kind = case
    found, precise, torch_s = (
        executor.to_logits(hidden_alone(executor, PROMPT))
        for executor in (
            executor_for(model, weights, kind),
            executor_for(model, weights),
            reference(model, kind, BatchedTorchOps()),
        )
    )
    error = float((found - precise).square().sum() / precise.square().sum())
    assert 0 < error <= (ROUNDING[kind] if weights == "fp32" else INT8_ACTIVATIONS)  # whose rounding flips on the way
    assert (found - torch_s).square().sum() <= INT8_ACTIVATIONS * torch_s.square().sum()


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_the_demo_model_hardly_notices(demo: Path, kind: str) -> None:
    spec = read_spec(demo)
    weights, ids = load_dense(Checkpoint(demo, spec)), Tokenizer.load(demo, spec.vocab_size).encode(TEXT)
    log_p, log_q = (
        torch.log_softmax(
            logits_of(ReferenceExecutor(spec, weights, 200, BatchedTorchOps(), cache=cache), ids).double(), -1
        )
        for cache in (CpuKvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, 200, kind=k) for k in ("fp32", kind))
    )
    mean_kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert 0 < mean_kl <= MEAN_KL[kind] and not math.isnan(mean_kl)


def test_keys_and_values_beyond_fp16s_range_are_no_infinities(tmp_path: Path) -> None:
    """Biases of Qwen2's keys reach hundreds; these reach a million, and those of its values, too."""
    spec, weights = model_of("qwen2", "int4", tmp_path)
    for name, bias in weights.vectors.items():
        if name.endswith("qkv_bias"):
            bias[spec.query_size :] = torch.linspace(-1e6, 1e6, 2 * spec.kv_size)
    for made in (on_kernels((spec, weights), "fp16"), reference((spec, weights), "fp16", BatchedTorchOps())):
        assert made.to_logits(hidden_alone(made, PROMPT)).isfinite().all()
        made.close()


def logits_of(executor: Executor, ids: list[int]) -> torch.Tensor:
    executor.cache.open(0)
    return executor.logits(Batch.of_sequence(0, 0, ids), range(len(ids)))
