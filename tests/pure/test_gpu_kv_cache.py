"""The GPU's KV cache, here on the CPU: pages are borrowed, kept apart and given back; a refused pass changes
nothing."""

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.options.engine import MAX_SEQUENCES
from hetero_ee.serving.settings import N_EXPRESS, SERVER_OPTIONS
from hetero_ee_kernels.pages import PAGE_TOKENS
from hetero_ee_kernels.reference import kv_write
from tests.kv_cache_machine import BYTES_PER_TOKEN, KINDS, LAYERS, SHAPE, CacheMachine

MAX_TOKENS, POOL_PAGES, N_SLOTS = 3 * PAGE_TOKENS - 5, 7, 3


def new_cache(kind: str = "fp32") -> GpuKvCache:
    device, pool_tokens = torch.device("cpu"), POOL_PAGES * PAGE_TOKENS
    return GpuKvCache(SHAPE, MAX_TOKENS, device, pool_tokens=pool_tokens, n_slots=N_SLOTS, kind=kind, layers=LAYERS)


def n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


class GpuKvCacheMachine(CacheMachine):
    max_tokens, n_slots = MAX_TOKENS, N_SLOTS

    def new_cache(self) -> GpuKvCache:
        return new_cache(self.kind)

    def write(self, layer: int, batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> None:
        """By the kernel's reference."""
        slots, positions = (
            torch.tensor(part, dtype=torch.int32) for part in (self.cache.slots(batch), batch.positions)
        )
        x, place = torch.cat([keys.flatten(1), values.flatten(1)], 1), self.cache.index(layer)
        kv_write(x, self.cache.pages, slots, positions, place, 0, x.shape[1] // 2)

    def fits(self, longest: dict[int, int]) -> bool:
        return sum(map(n_pages, longest.values())) <= POOL_PAGES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_what_is_written_is_read_back(kind: str) -> None:
    machine = type("Machine", (GpuKvCacheMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=20))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_taken_once(kind: str) -> None:
    cache = new_cache(kind)
    before = cache.n_bytes
    assert before == POOL_PAGES * PAGE_TOKENS * BYTES_PER_TOKEN[kind] + N_SLOTS * 3 * 4
    cache.open(0)
    cache.admit(Batch.of_sequence(0, 0, [1] * 100))
    assert cache.n_bytes == before


def test_a_pass_that_is_refused_admits_no_row() -> None:
    cache = new_cache()
    for sequence in range(3):
        cache.open(sequence)
    cache.admit(Batch.of_sequence(2, 0, [1] * MAX_TOKENS))
    full = [Batch.of_sequence(0, 0, [1] * MAX_TOKENS), Batch.of_sequence(1, 0, [1] * (PAGE_TOKENS + 1))]
    for bad in (
        Batch.joined(full),
        Batch.joined([full[1], Batch.of_sequence(9, 0, [1])]),
        Batch.of_sequence(0, 1, [1]),
    ):
        with pytest.raises(ValueError):
            cache.admit(bad)
        assert [cache.length(sequence) for sequence in range(3)] == [0, 0, MAX_TOKENS]
    cache.admit(full[0])  # the pages are still there


def test_pages_of_rows_that_wait_stay() -> None:
    cache = new_cache()
    for sequence in range(3):
        cache.open(sequence)
    cache.admit(Batch.of_sequence(0, 0, [1] * MAX_TOKENS), range(2))
    cache.admit(Batch.of_sequence(0, 0, [1] * 3), range(2, 6))
    cache.cut(0, 2, range(2, 6))
    assert (cache.length(0), cache.length_at(0, 1)) == (2, MAX_TOKENS)
    cache.admit(Batch.of_sequence(1, 0, [1] * MAX_TOKENS))
    with pytest.raises(ValueError, match="don't fit"):
        cache.admit(Batch.of_sequence(2, 0, [1] * (PAGE_TOKENS + 1)))
    cache.truncate(0, cache.length(0))
    cache.admit(Batch.of_sequence(2, 0, [1] * (PAGE_TOKENS + 1)))
    cache.check()


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="no cache is called bf16"):
        new_cache("bf16")
    cache = new_cache()
    cache.open(0)
    with pytest.raises(ValueError, match="open already"):
        cache.open(0)
    with pytest.raises(ValueError, match="can't be cut to 1"):
        cache.truncate(0, 1)
    cache.close(77)


def test_every_slot_of_a_server_can_have_a_sequence() -> None:
    most = SERVER_OPTIONS["n_slots"].most
    assert most is not None and most + N_EXPRESS <= MAX_SEQUENCES
