"""Models with sliding windows, whose KV cache keeps only what tokens may see: bits are those of all keys."""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hetero_ee.kv import cpu as cpu_cache
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import host_cache
from hetero_ee.layers import state
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from tests.e2e.test_recurrent_layers import Walk
from tests.emulation import planned
from tests.executor_support import hidden_alone, model_of
from tests.placements import visiting
from tests.stand_in_machine import on_stand_in

MAX_TOKENS = 460
TEXT = [(7 * i * i + 3) % 131 for i in range(420)]
OTHER = [(5 * i + 11) % 131 for i in range(420)]
CASES = [("mistral", "fp32", "fp32"), ("gemma4-e", "int4", "fp16"), ("gemma3", "int4", "int8")]


class LongWalk(Walk):
    text, other = TEXT, OTHER


@pytest.fixture(scope="module", autouse=True)
def small_storage() -> Iterator[None]:
    """Storage that is full after few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_cache, "PAGE_TOKENS", 64)
        patch.setattr(state, "MAX_PASS_TOKENS", 16)
        yield


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    family, weights, kind = request.param
    spec, loaded = model_of(family, weights, tmp_path_factory.mktemp(family), max_position_embeddings=MAX_TOKENS)
    cache = host_cache(spec, MAX_TOKENS, kind)
    if weights == "fp32":
        made: Executor = ReferenceExecutor(spec, loaded, MAX_TOKENS, cache=cache)
    else:
        use_kernel_cache(Path(os.environ["HETERO_EE_CACHE_DIR"]))
        from hetero_ee.runtime.executors.cpu import CpuExecutor

        made = CpuExecutor(spec, loaded, MAX_TOKENS, 2, cache=cache)
    yield made
    made.close()


def test_rollbacks_have_the_bits_of_all_keys(executor: Executor) -> None:
    expected = hidden_alone(executor, TEXT)  # one pass, which keeps all keys
    walks = [LongWalk(executor, seed, expected) for seed in range(2)]
    n_dropped = 0
    for _ in range(30):
        for walk in walks:
            walk.step()
            executor.cache.check()
            n_dropped += executor.cache.restorable(walk.sequence, max(0, walk.n_true - 200)) < walk.n_true - 200
    for walk in walks:
        executor.cache.close(walk.sequence)
    assert n_dropped > 3


def test_a_snapshot_has_the_bits_of_a_fresh_read(executor: Executor) -> None:
    cache, sequence = executor.cache, executor.cache.open_new()

    def read(tokens: list[int]) -> torch.Tensor:
        first = cache.length(sequence)
        return executor.hidden(Batch.of_sequence(sequence, first, tokens[first:]))

    for length in (30, 150, 200, 300, 420):
        read(TEXT[:length])
        cache.mark(sequence)
    assert [cache.restorable(sequence, length) for length in (29, 190, 250, 410)] == [0, 150, 200, 410]
    assert cache.truncate(sequence, 190) == 150
    changed = [*TEXT[:150], *OTHER[:200]]
    expected = hidden_alone(executor, changed)[150:]
    assert torch.equal(torch.cat([read(changed[:at]) for at in (160, 161, 300, 350)]), expected)
    cache.check()
    cache.close(sequence)


@pytest.mark.parametrize("kv_type", KV_BYTES)
def test_a_gpu_computes_the_same_with_the_pages_of_the_window(
    kv_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "MAX_PASS_TOKENS", MAX_TOKENS)  # so that the pools hold a pass of the whole text
    spec, weights = model_of("gemma3", "int4", tmp_path, max_position_embeddings=MAX_TOKENS)
    made = planned(spec, overrides=((".*", "gpu"),), context_tokens=MAX_TOKENS, kv_type=kv_type)
    beside = visiting(
        planned(spec, overrides=(("head", "gpu"), (".*", "cpu")), context_tokens=MAX_TOKENS, kv_type=kv_type)
    )
    resident, visits = on_stand_in(spec, weights, made), on_stand_in(spec, weights, beside)
    expected = hidden_alone(resident, TEXT)
    for executor, more in ((resident, [101]), (visits, [])):  # a single token would not visit
        sequence, found = executor.cache.open_new(), []
        for first, end in pairwise(sorted([0, 100, 150, 200, 230, 300, 345, 400, 420, *more])):
            found.append(executor.hidden(Batch.of_sequence(sequence, first, TEXT[first:end])))
            executor.cache.check()
            assert executor.cache.truncate(sequence, end) == end
        assert torch.equal(torch.cat(found), expected)
        if executor is resident:
            assert executor.cache.restorable(sequence, 100) == 0
        executor.close()
