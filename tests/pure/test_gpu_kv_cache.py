"""The GPU's KV cache, here on the CPU: pages are lent, kept apart and given back; a refused pass changes nothing."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hetero_ee.errors import UsageError
from hetero_ee.runtime.gpu_kv_cache import GpuKvCache
from hetero_ee.runtime.rows import Rows
from hetero_ee_kernels.pages import PAGE_TOKENS
from hetero_ee_kernels.reference.kv_write import kv_write

SHAPE = (2, 3, 4)  # layers, key heads, features
MAX_TOKENS, POOL_PAGES, N_SLOTS = 3 * PAGE_TOKENS - 5, 7, 3


def new_cache(kind: str = "fp32") -> GpuKvCache:
    pool_tokens = POOL_PAGES * PAGE_TOKENS
    return GpuKvCache(SHAPE, MAX_TOKENS, torch.device("cpu"), pool_tokens=pool_tokens, n_slots=N_SLOTS, kind=kind)


def write(cache: GpuKvCache, rows: Rows, stamp: int) -> None:
    """Keys that tell layer, sequence, position and time apart; values are their negatives."""
    slots, positions = (torch.tensor(part, dtype=torch.int32) for part in (cache.slots(rows), rows.positions))
    for layer in range(SHAPE[0]):
        numbers = [[layer, sequence, position, stamp] for _, sequence, position in rows.places()]
        keys = torch.tensor(numbers, dtype=torch.float32).repeat(1, SHAPE[1])
        kv_write(torch.cat([keys, -keys], 1), cache.pages, slots, positions, layer, 0, keys.shape[1])


def n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


class CacheMachine(RuleBasedStateMachine):
    """Beside the cache, `stamps` says for each open sequence when each of its positions was written."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.stamps, self.time = new_cache(), {}, 0

    @rule(target=sequences)
    def open_new(self) -> object:
        if len(self.stamps) == N_SLOTS:
            with pytest.raises(UsageError, match="3 sequences are open"):
                self.cache.open_new()
            return multiple()
        sequence = self.cache.open_new()
        assert sequence not in self.stamps
        self.stamps[sequence] = []
        return sequence

    @rule(sequence=consumes(sequences))
    def close(self, sequence: int) -> None:
        self.cache.close(sequence)
        self.cache.close(sequence)
        self.stamps.pop(sequence, None)

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        if sequence in self.stamps:
            length = round(share * len(self.stamps[sequence]))
            self.cache.truncate(sequence, length)
            del self.stamps[sequence][length:]

    @rule(chosen=st.lists(st.tuples(sequences, st.integers(1, PAGE_TOKENS + 3)), min_size=1, max_size=3))
    def extend(self, chosen: list[tuple[int, int]]) -> None:
        counts = {sequence: count for sequence, count in chosen if sequence in self.stamps}
        if not counts:
            return
        rows = Rows.joined([Rows.of_sequence(s, len(self.stamps[s]), [0] * n) for s, n in counts.items()])
        lengths = {s: len(held) + counts.get(s, 0) for s, held in self.stamps.items()}
        if max(lengths.values()) > MAX_TOKENS:
            with pytest.raises(ValueError, match="can't follow"):
                self.cache.admit(rows)
        elif sum(map(n_pages, lengths.values())) > POOL_PAGES:
            with pytest.raises(UsageError, match="don't fit the GPU's cache of 448;"):
                self.cache.admit(rows)
        else:
            self.time += 1
            self.cache.admit(rows)
            write(self.cache, rows, self.time)
            for sequence, count in counts.items():
                self.stamps[sequence] += [self.time] * count

    @invariant()
    def everything_written_is_read_back(self) -> None:
        for sequence, stamps in self.stamps.items():
            assert self.cache.length(sequence) == len(stamps)
            for layer in range(SHAPE[0] if stamps else 0):
                keys, values = self.cache.read(layer, sequence, 0, len(stamps))
                numbers = [[layer, sequence, position, stamp] for position, stamp in enumerate(stamps)]
                expected = torch.tensor(numbers, dtype=torch.float32).expand(SHAPE[1], -1, -1)
                assert torch.equal(keys, expected) and torch.equal(values, -expected)


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestCache = CacheMachine.TestCase


def test_memory_is_taken_once() -> None:
    cache = new_cache("int8")
    before = cache.n_bytes
    cells = POOL_PAGES * PAGE_TOKENS * 2 * SHAPE[0] * SHAPE[1]
    assert before == cells * (SHAPE[2] + 4) + N_SLOTS * 3 * 4
    cache.open(0)
    cache.admit(Rows.of_sequence(0, 0, [1] * 100))
    assert cache.n_bytes == before


def test_a_pass_that_is_refused_admits_no_row() -> None:
    cache = new_cache()
    for sequence in range(3):
        cache.open(sequence)
    cache.admit(Rows.of_sequence(2, 0, [1] * MAX_TOKENS))
    full = [Rows.of_sequence(0, 0, [1] * MAX_TOKENS), Rows.of_sequence(1, 0, [1] * (PAGE_TOKENS + 1))]
    for bad in (Rows.joined(full), Rows.joined([full[1], Rows.of_sequence(9, 0, [1])]), Rows.of_sequence(0, 1, [1])):
        with pytest.raises(ValueError):
            cache.admit(bad)
        assert [cache.length(sequence) for sequence in range(3)] == [0, 0, MAX_TOKENS]
    cache.admit(full[0])  # the pages are still there


def test_wrong_uses_are_refused() -> None:
    cache = new_cache()
    cache.open(0)
    with pytest.raises(ValueError, match="open already"):
        cache.open(0)
    with pytest.raises(ValueError, match="can't be cut to 1"):
        cache.truncate(0, 1)
    cache.close(77)
