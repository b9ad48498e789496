"""The KV cache: what is written is read back, whatever is opened, extended, cut and closed in between."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, run_state_machine_as_test

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import PAGE_TOKENS, CpuKvCache
from tests.kv_cache_machine import BYTES_PER_TOKEN, KINDS, LAYERS, SHAPE, CacheMachine, rounded

MAX_TOKENS = 3 * PAGE_TOKENS - 5


def new_cache(kind: str = "fp32") -> CpuKvCache:
    return CpuKvCache(*SHAPE, MAX_TOKENS, layers=LAYERS, kind=kind)


class KvCacheMachine(CacheMachine):
    max_tokens = MAX_TOKENS

    def new_cache(self) -> CpuKvCache:
        return new_cache(self.kind)

    def write(self, layer: int, batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache.write(layer, batch, keys, values)

    @invariant()
    def memory_is_in_proportion(self) -> None:
        n_held = sum(max(map(len, layers)) for layers in self.stamps.values())
        assert self.cache.n_bytes >= n_held * BYTES_PER_TOKEN[self.kind]
        assert self.cache.n_bytes <= len(self.stamps) * MAX_TOKENS * BYTES_PER_TOKEN[self.kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_what_is_written_is_read_back(kind: str) -> None:
    machine = type("Machine", (KvCacheMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=25))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_the_pages(kind: str) -> None:
    cache, token = new_cache(kind), BYTES_PER_TOKEN[kind]
    cache.open(0)
    assert cache.n_bytes == 0
    first = Batch.of_sequence(0, 0, [1])
    cache.admit(first, range(1))
    assert cache.n_bytes == PAGE_TOKENS * token
    cache.admit(first, range(1, 6))
    assert cache.n_bytes == PAGE_TOKENS * token
    cache.admit(Batch.of_sequence(0, 1, [1] * PAGE_TOKENS))
    assert cache.n_bytes == 2 * PAGE_TOKENS * token
    cache.admit(Batch.of_sequence(0, PAGE_TOKENS + 1, [1] * PAGE_TOKENS))
    assert cache.n_bytes == MAX_TOKENS * token
    cache.truncate(0, 0)
    cache.open(1)
    assert cache.n_bytes == MAX_TOKENS * token
    cache.close(0)
    assert cache.n_bytes == 0


def test_closing_frees_the_memory_and_the_number() -> None:
    cache = new_cache()
    assert [cache.open_new(), cache.open_new(), cache.open_new()] == [0, 1, 2]
    cache.admit(Batch.of_sequence(1, 0, [1] * 300))
    cache.close(1)
    assert cache.n_bytes == 0 and cache.open_new() == 1 and cache.length(1) == 0
    cache.close(77)


def test_a_sequence_fills_to_the_last_position_and_no_further() -> None:
    cache = new_cache()
    cache.open(0)
    cache.admit(Batch.of_sequence(0, 0, [1] * MAX_TOKENS))
    with pytest.raises(ValueError, match=f"holds {MAX_TOKENS} of {MAX_TOKENS}"):
        cache.admit(Batch.of_sequence(0, MAX_TOKENS, [1]))


def test_a_refused_pass_admits_no_row() -> None:
    cache = new_cache()
    cache.open(0)
    cache.open(1)
    good = Batch.of_sequence(0, 0, [1, 2])
    for bad in (Batch.of_sequence(1, 1, [1]), Batch.of_sequence(9, 0, [1]), Batch.of_sequence(0, 3, [1])):
        with pytest.raises(ValueError):
            cache.admit(Batch.joined([good, bad]))
        assert (cache.length(0), cache.length(1), cache.n_bytes) == (0, 0, 0)
    cache.admit(Batch.joined([good, Batch.of_sequence(1, 0, [1])]))
    assert (cache.length(0), cache.length(1)) == (2, 1)


def test_rows_wait_in_front_of_a_layer() -> None:
    cache = new_cache()
    cache.open(0)
    waiting = Batch.of_sequence(0, 0, [1, 2, 3])
    with pytest.raises(ValueError, match="0 tokens of sequence 0 have passed the layer before, not 3"):
        cache.admit(waiting, range(1, 6))
    cache.admit(waiting, range(2))
    assert (cache.length(0), cache.length_at(0, 1), cache.length_at(0, 3)) == (0, 3, 0)
    with pytest.raises(ValueError, match="holds 0 tokens in one layer and 3 in another"):
        cache.admit(Batch.of_sequence(0, 3, [4]))
    cache.admit(Batch.of_sequence(0, 0, [1, 2]), range(2, 6))  # 2 isn't held
    assert (cache.length(0), cache.length_at(0, 1), cache.length_at(0, 4)) == (2, 3, 2)
    cache.truncate(0, 3)
    assert (cache.length(0), cache.length_at(0, 1)) == (2, 3)  # cutting makes no layer longer
    cache.truncate(0, 2)
    assert cache.length_at(0, 1) == 2
    cache.admit(Batch.of_sequence(0, 7, [4]), range(2, 3))  # of layers that others hold it knows nothing
    assert cache.length(0) == 2
    cache.check()


def test_wrong_uses_are_refused() -> None:
    for wrong in (
        lambda: CpuKvCache(*SHAPE, MAX_TOKENS, kind="bf16"),
        lambda: CpuKvCache(*SHAPE, MAX_TOKENS, layers=(0, 1, 4, 3), kind="fp16"),
        lambda: CpuKvCache(*SHAPE, MAX_TOKENS, layers=(0, 1, 3), kind="fp16"),
    ):
        with pytest.raises(ValueError, match=r"no cache is called bf16|must ascend|of 4 layers can't hold 3"):
            wrong()
    cache = new_cache()
    cache.open(0)
    cache.admit(Batch.of_sequence(0, 0, [1, 2, 3]))
    for length in (-1, 4):
        with pytest.raises(ValueError, match="can't be cut"):
            cache.truncate(0, length)
    with pytest.raises(ValueError, match="follow each other"):
        cache.admit(Batch.of_sequence(0, 3, [4]), range(0, 6, 2))
    assert cache.length(0) == 3


def test_rows_must_match_and_be_there() -> None:
    for parts in (((), (), ()), ((1,), (), (0,)), ((1, 2), (0, 0), (0,))):
        with pytest.raises(ValueError, match="as many sequences"):
            Batch(*parts)


def test_a_view_is_made_once_and_again_after_growth() -> None:
    cache, made = new_cache("int8"), []

    def make(first: int, *parts: Any) -> Any:
        made.append(parts)
        return parts

    cache.open(0)
    cache.admit(Batch.of_sequence(0, 0, [1]))
    assert cache.view(0, make) is cache.view(0, make)
    assert [tuple(part.shape) for part in made[0]] == 2 * [(4, 3, 256, 4)] + 2 * [(4, 3, 256)]
    cache.admit(Batch.of_sequence(0, 1, [1] * PAGE_TOKENS))
    assert cache.view(0, make)[0].shape[2] == 2 * PAGE_TOKENS and len(made) == 2


magnitudes = st.sampled_from([0.0, 1e-45, 1e-38, 9.9e-31, 1.1e-30, 1e-5, 1.0, 65504.0, 65520.0, 1e38, 3.4e38])


@given(st.sampled_from(KINDS), magnitudes, st.integers(0, 2**32 - 1))
def test_any_finite_value_is_rounded_as_defined(kind: str, magnitude: float, seed: int) -> None:
    """Nothing finite becomes NaN or infinite."""
    x = np.random.default_rng(seed).uniform(-1, 1, (2, SHAPE[1], SHAPE[2])).astype(np.float32)
    x *= np.float32(magnitude)
    x[0, 0, 0] = magnitude
    cache = new_cache(kind)
    cache.open(0)
    row = Batch.of_sequence(0, 0, [1])
    cache.admit(row)
    cache.write(3, row, torch.from_numpy(x[:1]), torch.from_numpy(x[1:]))
    expected = rounded(kind, x)
    found = np.stack([part[:, 0].numpy() for part in cache.read(3, 0, 0, 1)])
    assert np.array_equal(found, expected)
    assert np.isfinite(found).all()
