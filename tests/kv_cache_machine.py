"""One state machine for both KV caches: what is written is read back, whatever is opened, extended, cut and closed.

Beside the cache, the machine keeps for each open sequence and layer when each position was written.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from tests.kv_contents import read_back

N_KV_HEADS, HEAD_DIM = 3, 4
LAYERS = (0, 1, 3, 4)  # held of a model with six
SHAPE = (len(LAYERS), N_KV_HEADS, HEAD_DIM)
KINDS = ("fp32", "fp16", "int8")
BYTES_PER_TOKEN = {kind: 2 * len(LAYERS) * N_KV_HEADS * n for kind, n in (("fp32", 16), ("fp16", 8), ("int8", 4 + 4))}


def marks(layer: int, sequence: int, positions: Any, stamps: Any) -> Any:
    """Keys fp32 (n, heads, head_dim) that tell layer, sequence, position, time and head apart and need rounding."""
    columns = np.broadcast_arrays(layer + 1, sequence, positions, stamps)
    numbers = np.stack(columns, -1).astype(np.float32) * np.float32(0.37)
    return numbers[:, None] * np.arange(1, N_KV_HEADS + 1, dtype=np.float32)[:, None]


def rounded(kind: str, x: Any) -> Any:
    """What a cache of this kind makes of x, fp32 (..., head_dim), in NumPy."""
    if kind == "fp32":
        return x
    if kind == "fp16":
        return x.clip(-65504, 65504).astype(np.float16).astype(np.float32)
    peak = np.abs(x).max(-1, keepdims=True)
    small = peak < np.float32(1e-30)
    with np.errstate(divide="ignore"):
        inverse = np.where(small, np.float32(0), np.float32(127) / peak)
    scale = np.where(small, np.float32(0), peak / np.float32(127))
    return np.rint(x * inverse) * scale


def all_marks(layer: int, batch: Batch, stamp: int) -> torch.Tensor:
    """The keys of a pass; its values are -3 times as much."""
    parts = [marks(layer, sequence, [position], stamp) for _, sequence, position in batch.entries()]
    return torch.from_numpy(np.concatenate(parts))


class CacheMachine(RuleBasedStateMachine):
    """Subclasses say new_cache() and write(); n_pages_left() where pages are limited."""

    kind, max_tokens, n_slots = "fp32", 0, 100
    sequences = Bundle("sequences")

    def new_cache(self) -> Any:
        raise NotImplementedError

    def write(self, layer: int, batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> None:
        raise NotImplementedError

    def fits(self, longest: dict[int, int]) -> bool:
        """Whether the cache has room for sequences of these lengths."""
        return True

    @initialize()
    def start(self) -> None:
        self.cache = self.new_cache()
        self.stamps: dict[int, list[list[int]]] = {}
        self.time = 0

    @rule(target=sequences)
    def open_new(self) -> Any:
        if len(self.stamps) == self.n_slots:
            with pytest.raises(UsageError, match=f"{self.n_slots} sequences are open"):
                self.cache.open_new()
            return multiple()
        sequence = self.cache.open_new()
        assert sequence == min(set(range(len(self.stamps) + 1)) - self.stamps.keys())
        self.stamps[sequence] = [[] for _ in LAYERS]
        return sequence

    @rule(target=sequences, number=st.integers(0, 5))
    def open(self, number: int) -> Any:
        if number in self.stamps or len(self.stamps) == self.n_slots:
            with pytest.raises(ValueError, match="open"):
                self.cache.open(number)
            return multiple()
        self.cache.open(number)
        self.stamps[number] = [[] for _ in LAYERS]
        return number

    @rule(sequence=consumes(sequences))
    def close(self, sequence: int) -> None:
        self.cache.close(sequence)
        self.cache.close(sequence)
        self.stamps.pop(sequence, None)

    @rule(sequence=sequences, share=st.floats(0, 1), least=st.booleans())
    def truncate(self, sequence: int, share: float, least: bool) -> None:
        """To a share of what passed every layer, or of what passed the first: then pending rows stay."""
        if sequence in self.stamps:
            lengths = [len(held) for held in self.stamps[sequence]]
            with pytest.raises(ValueError, match="can't be cut"):
                self.cache.truncate(sequence, max(lengths) + 1)
            length = round(share * (min(lengths) if least else max(lengths)))
            self.cache.truncate(sequence, length)
            for held in self.stamps[sequence]:
                del held[length:]

    @rule(
        chosen=st.lists(st.tuples(sequences, st.integers(1, 300)), min_size=1, max_size=3),
        layers=st.none() | st.tuples(st.sampled_from([0, 0, 0, 1, 3]), st.integers(0, 6)),
    )
    def extend(self, chosen: list[tuple[int, int]], layers: tuple[int, int] | None) -> None:
        """Rows through any range of layers, from where the first of them stands."""
        counts = {sequence: count for sequence, count in chosen if sequence in self.stamps}
        part = None if layers is None else range(*layers)
        if counts:
            self._pass(counts, part)

    @rule(sequence=sequences, n_rows=st.integers(1, 300), n_layers=st.integers(1, 6))
    def catch_up(self, sequence: int, n_rows: int, n_layers: int) -> None:
        """Rows that wait pass the next layers."""
        if sequence not in self.stamps:
            return
        lengths = [len(held) for held in self.stamps[sequence]]
        behind = next((place for place in range(1, len(LAYERS)) if lengths[place] < lengths[place - 1]), None)
        if behind is not None:
            self._pass(
                {sequence: min(n_rows, lengths[behind - 1] - lengths[behind])},
                range(LAYERS[behind], LAYERS[behind] + n_layers),
            )

    @rule(sequence=sequences, offset=st.sampled_from([-1, 1, 5]))
    def extend_out_of_order(self, sequence: int, offset: int) -> None:
        if sequence in self.stamps and len(self.stamps[sequence][0]) + offset >= 0:
            with pytest.raises(ValueError, match="can't follow"):
                self.cache.admit(Batch.of_sequence(sequence, len(self.stamps[sequence][0]) + offset, [0]), range(1))

    def _pass(self, counts: dict[int, int], part: range | None) -> None:
        places = [place for place, layer in enumerate(LAYERS) if part is None or layer in part]
        first = {s: len(self.stamps[s][places[0]]) if places else 0 for s in counts}
        batch = Batch.joined([Batch.of_sequence(s, first[s], [0] * n) for s, n in counts.items()])
        if places and not self._may_pass(counts, first, places):
            with pytest.raises(ValueError, match=r"can't follow|in one layer|have passed"):
                self.cache.admit(batch, part)
            return
        longest = {s: len(held[0]) for s, held in self.stamps.items()}
        if places and not self.fits(longest | {s: max(longest[s], first[s] + n) for s, n in counts.items()}):
            with pytest.raises(UsageError, match="don't fit"):
                self.cache.admit(batch, part)
            return
        self.time += 1
        self.cache.admit(batch, part)
        for place in places:
            keys = all_marks(LAYERS[place], batch, self.time)
            self.write(LAYERS[place], batch, keys, -3 * keys)
            for sequence, count in counts.items():
                self.stamps[sequence][place] += [self.time] * count

    def _may_pass(self, counts: dict[int, int], first: dict[int, int], places: list[int]) -> bool:
        return all(
            first[s] + n <= self.max_tokens
            and all(len(self.stamps[s][place]) == first[s] for place in places)
            and (places[0] == 0 or first[s] + n <= len(self.stamps[s][places[0] - 1]))
            for s, n in counts.items()
        )

    @invariant()
    def everything_written_is_read_back(self) -> None:
        for sequence, layers in self.stamps.items():
            for layer, stamps in zip(LAYERS, layers, strict=True):
                written = marks(layer, sequence, np.arange(len(stamps)), stamps)
                for found, given in zip(
                    read_back(self.cache, layer, sequence, 0, len(stamps)), (written, -3 * written), strict=True
                ):
                    assert np.array_equal(found.numpy(), rounded(self.kind, given).swapaxes(0, 1))

    @invariant()
    def lengths_are_those_of_each_layer(self) -> None:
        self.cache.check()
        assert sorted(self.cache.sequences) == sorted(self.stamps)
        for sequence, layers in self.stamps.items():
            assert [self.cache.length_at(sequence, layer) for layer in LAYERS] == [len(held) for held in layers]
            assert self.cache.length(sequence) == min(map(len, layers))
            with pytest.raises(KeyError):
                self.cache.length_at(sequence, 2)
