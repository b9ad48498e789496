"""A KV cache whose growth fails: no row is admitted, nothing is lost, and the same pass succeeds afterwards."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.kv import cpu as kv_cache
from hetero_ee.kv import gpu as gpu_kv_cache
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.gpu import GpuKvCache
from tests.kv_cache_machine import KINDS, LAYERS, SHAPE, all_marks, rounded

N_SEQUENCES, MAX_TOKENS, PAGE_TOKENS = 3, 100, 8
GPU_TOKENS = 900
ERRORS = [MemoryError("no room"), KeyboardInterrupt()]
before_and_after = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
errors = pytest.mark.parametrize("error", ERRORS, ids=["memory", "ctrl-c"])


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory alone; the pages on a GPU are those of the kernels."""
    monkeypatch.setattr(kv_cache, "PAGE_TOKENS", PAGE_TOKENS)


def rows_of(n_first: int, n_rows: int) -> Batch:
    return Batch.joined([Batch.of_sequence(s, n_first + s, [0] * n_rows) for s in range(N_SEQUENCES)])


def filled(kind: str) -> CpuKvCache:
    """Sequences of 6, 7 and 8 tokens, of which the last layers lack 2."""
    cache = CpuKvCache(*SHAPE, MAX_TOKENS, layers=LAYERS, kind=kind)
    for sequence in range(N_SEQUENCES):
        cache.open(sequence)
        write(cache, Batch.of_sequence(sequence, 0, [0] * (6 + sequence)), range(2))
        write(cache, Batch.of_sequence(sequence, 0, [0] * (4 + sequence)), range(2, 6))
    return cache


def write(cache: CpuKvCache, batch: Batch, layers: range) -> None:
    cache.admit(batch, layers)
    for layer in cache.held_layers:
        if layer in layers:
            keys = all_marks(layer, batch, 1)
            cache.write(layer, batch, keys, -3 * keys)


def assert_holds(cache: CpuKvCache, n_early: int, n_late: int) -> None:
    """Each sequence in each layer what was written there, and no more."""
    cache.check()
    for sequence, layer in itertools.product(range(N_SEQUENCES), LAYERS):
        length = cache.length_at(sequence, layer)
        assert length == (n_early if layer < 2 else n_late) + sequence
        keys, values = cache.read(layer, sequence, 0, length)
        written = all_marks(layer, Batch.of_sequence(sequence, 0, [0] * length), 1).numpy()
        assert np.array_equal(keys.numpy(), rounded(cache.kind, written).swapaxes(0, 1))
        assert np.array_equal(values.numpy(), rounded(cache.kind, -3 * written).swapaxes(0, 1))


@contextmanager
def failing(owner: Any, name: str, n_calls: int, error: BaseException, after: bool) -> Iterator[list[int]]:
    """The n-th call (from 0) raises, before or after it has done its work. Yields a list with an entry a call."""
    function, calls = getattr(owner, name), []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) != n_calls + 1:
            return function(*arguments, **options)
        if after:
            function(*arguments, **options)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield calls


def n_parts(kind: str) -> int:
    return 4 if kind == "int8" else 2


@errors
@before_and_after
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_any_allocation_of_a_growing_pass_fails(kind: str, error: BaseException, after: bool) -> None:
    """Each sequence's lower layers outgrow their room; the n-th of their arrays can't be had."""
    for n_calls in range(N_SEQUENCES * n_parts(kind)):
        cache = filled(kind)
        with failing(kv_cache.np, "zeros", n_calls, error, after), pytest.raises(type(error)):
            cache.admit(rows_of(6, 7), range(2))
        assert_holds(cache, 6, 4)
        n_whole = n_calls // n_parts(kind)  # sequences that have their room already keep it
        assert cache.n_bytes == filled(kind).n_bytes // N_SEQUENCES * (N_SEQUENCES + n_whole)
        write(cache, rows_of(6, 7), range(2))
        write(cache, rows_of(4, 9), range(2, 6))
        assert_holds(cache, 13, 13)
        assert cache.n_bytes == 2 * filled(kind).n_bytes
    with failing(kv_cache.np, "zeros", 99, error, after) as calls:
        filled(kind).admit(rows_of(6, 7), range(2))
    assert len(calls) == 3 * N_SEQUENCES * n_parts(kind)  # empty, full, grown


@errors
@before_and_after
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_can_t_be_opened(kind: str, error: BaseException, after: bool) -> None:
    for n_calls in range(n_parts(kind)):
        cache = filled(kind)
        with failing(kv_cache.np, "zeros", n_calls, error, after), pytest.raises(type(error)):
            cache.open_new()
        assert cache.sequences == (0, 1, 2)
        assert_holds(cache, 6, 4)
        assert cache.open_new() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_that_can_t_be_made(kind: str) -> None:
    cache = filled(kind)

    def fail(*parts: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.view(0, fail)
    assert cache.view(0, lambda first, *parts: parts)[0].shape[2] == PAGE_TOKENS


@errors
@before_and_after
def test_any_page_on_a_gpu_fails(error: BaseException, after: bool) -> None:
    """The table's lines are written one by one; the n-th can't be."""
    for n_calls in range(N_SEQUENCES):
        cache = GpuKvCache(SHAPE, GPU_TOKENS, torch.device("cpu"), layers=LAYERS, kind="fp16")
        for sequence in range(N_SEQUENCES):
            cache.open(sequence)
        wanted = Batch.joined([Batch.of_sequence(s, 0, [0] * 200) for s in range(N_SEQUENCES)])
        with failing(gpu_kv_cache.torch, "tensor", n_calls, error, after), pytest.raises(type(error)):
            cache.admit(wanted, range(2))
        cache.check()
        assert [cache.length_at(s, 0) for s in range(N_SEQUENCES)] == [0] * N_SEQUENCES
        cache.admit(wanted)
        cache.check()
        for sequence in range(N_SEQUENCES):
            cache.close(sequence)
        cache.open(0)
        cache.admit(Batch.of_sequence(0, 0, [0] * GPU_TOKENS))  # no page is lost
        cache.check()
