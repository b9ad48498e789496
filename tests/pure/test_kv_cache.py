"""The KV cache: what is written is read back, whatever is opened, extended, cut and closed in between."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hetero_ee.runtime.kv_cache import PAGE_TOKENS, KvCache
from hetero_ee.runtime.rows import Rows

N_LAYERS, N_KV_HEADS, HEAD_DIM, MAX_TOKENS = 2, 3, 4, 3 * PAGE_TOKENS - 5
BYTES_PER_TOKEN = 2 * N_LAYERS * N_KV_HEADS * HEAD_DIM * 4


def new_cache() -> KvCache:
    return KvCache(N_LAYERS, N_KV_HEADS, HEAD_DIM, MAX_TOKENS)


def marks(layer: int, rows: Rows, stamp: int) -> torch.Tensor:
    """Keys (m, heads, head_dim) that tell layer, sequence, position and time apart."""
    numbers = [[layer, sequence, position, stamp] for _, sequence, position in rows.places()]
    return torch.tensor(numbers, dtype=torch.float32)[:, None].repeat(1, N_KV_HEADS, 1)


class CacheMachine(RuleBasedStateMachine):
    """Beside the cache, `stamps` says for each open sequence when each of its positions was written."""

    sequences = Bundle("sequences")

    @initialize()
    def start(self) -> None:
        self.cache = new_cache()
        self.stamps: dict[int, list[int]] = {}
        self.time = 0

    @rule(target=sequences)
    def open_new(self) -> int:
        sequence = self.cache.open_new()
        assert sequence not in self.stamps
        self.stamps[sequence] = []
        return sequence

    @rule(target=sequences, number=st.integers(0, 5))
    def open(self, number: int) -> object:
        if number in self.stamps:
            with pytest.raises(ValueError, match="open already"):
                self.cache.open(number)
            return multiple()
        self.cache.open(number)
        self.stamps[number] = []
        return number

    @rule(sequence=consumes(sequences))
    def close(self, sequence: int) -> None:
        self.cache.close(sequence)
        self.cache.close(sequence)
        self.stamps.pop(sequence, None)

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        if sequence not in self.stamps:
            return
        length = round(share * len(self.stamps[sequence]))
        self.cache.truncate(sequence, length)
        del self.stamps[sequence][length:]

    @rule(chosen=st.lists(st.tuples(sequences, st.integers(1, PAGE_TOKENS + 3)), min_size=1, max_size=3))
    def extend(self, chosen: list[tuple[int, int]]) -> None:
        lengths = {sequence: count for sequence, count in chosen if sequence in self.stamps}
        if not lengths:
            return
        rows = Rows.joined(
            [Rows.of_sequence(sequence, len(self.stamps[sequence]), [0] * count) for sequence, count in lengths.items()]
        )
        if any(len(self.stamps[sequence]) + count > MAX_TOKENS for sequence, count in lengths.items()):
            with pytest.raises(ValueError, match="can't follow"):
                self.cache.admit(rows)
            return
        self.time += 1
        self.cache.admit(rows)
        for layer in range(N_LAYERS):
            keys = marks(layer, rows, self.time)
            self.cache.write(layer, rows, keys, -keys)
        for sequence, count in lengths.items():
            self.stamps[sequence] += [self.time] * count

    @rule(sequence=sequences, offset=st.sampled_from([-1, 1, 5]))
    def extend_out_of_order(self, sequence: int, offset: int) -> None:
        if sequence in self.stamps and len(self.stamps[sequence]) + offset >= 0:
            with pytest.raises(ValueError, match="can't follow"):
                self.cache.admit(Rows.of_sequence(sequence, len(self.stamps[sequence]) + offset, [0]))

    @invariant()
    def everything_written_is_read_back(self) -> None:
        for sequence, stamps in self.stamps.items():
            assert self.cache.length(sequence) == len(stamps)
            for layer in range(N_LAYERS):
                keys, values = self.cache.read(layer, sequence, 0, len(stamps))
                numbers = [[layer, sequence, position, stamp] for position, stamp in enumerate(stamps)]
                expected = torch.tensor(numbers, dtype=torch.float32).view(-1, 4).expand(N_KV_HEADS, -1, -1)
                assert torch.equal(keys, expected) and torch.equal(values, -expected)

    @invariant()
    def memory_is_in_proportion(self) -> None:
        assert self.cache.n_bytes >= sum(map(len, self.stamps.values())) * BYTES_PER_TOKEN
        assert self.cache.n_bytes <= len(self.stamps) * MAX_TOKENS * BYTES_PER_TOKEN


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestCache = CacheMachine.TestCase


def test_a_fresh_sequence_takes_no_memory() -> None:
    cache = new_cache()
    cache.open(0)
    assert cache.n_bytes == 0
    cache.admit(Rows.of_sequence(0, 0, [1]))
    assert cache.n_bytes == PAGE_TOKENS * BYTES_PER_TOKEN


def test_closing_frees_the_memory_and_the_number() -> None:
    cache = new_cache()
    assert [cache.open_new(), cache.open_new(), cache.open_new()] == [0, 1, 2]
    cache.admit(Rows.of_sequence(1, 0, [1] * 300))
    cache.close(1)
    assert cache.n_bytes == 0 and cache.open_new() == 1 and cache.length(1) == 0
    cache.close(77)


def test_a_sequence_fills_to_the_last_position_and_no_further() -> None:
    cache = new_cache()
    cache.open(0)
    cache.admit(Rows.of_sequence(0, 0, [1] * MAX_TOKENS))
    assert cache.n_bytes == MAX_TOKENS * BYTES_PER_TOKEN
    with pytest.raises(ValueError, match=f"holds {MAX_TOKENS} of {MAX_TOKENS}"):
        cache.admit(Rows.of_sequence(0, MAX_TOKENS, [1]))


def test_a_refused_pass_admits_no_row() -> None:
    cache = new_cache()
    cache.open(0)
    cache.open(1)
    good = Rows.of_sequence(0, 0, [1, 2])
    for bad in (Rows.of_sequence(1, 1, [1]), Rows.of_sequence(9, 0, [1]), Rows.of_sequence(0, 3, [1])):
        with pytest.raises(ValueError):
            cache.admit(Rows.joined([good, bad]))
        assert (cache.length(0), cache.length(1), cache.n_bytes) == (0, 0, 0)
    cache.admit(Rows.joined([good, Rows.of_sequence(1, 0, [1])]))
    assert (cache.length(0), cache.length(1)) == (2, 1)


def test_cutting_beyond_what_is_held_is_refused() -> None:
    cache = new_cache()
    cache.open(0)
    cache.admit(Rows.of_sequence(0, 0, [1, 2, 3]))
    for length in (-1, 4):
        with pytest.raises(ValueError, match="can't be cut"):
            cache.truncate(0, length)
    assert cache.length(0) == 3


def test_rows_must_match_and_be_there() -> None:
    for parts in (((), (), ()), ((1,), (), (0,)), ((1, 2), (0, 0), (0,))):
        with pytest.raises(ValueError, match="as many sequences"):
            Rows(*parts)
