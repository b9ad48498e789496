"""A pass's tokens, and the storage of their sequences, in the form that the CPU's kernels need."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.layers.ops import LookUp
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee_cpu_ops.attention.kv_table import SequenceCache, kv_table


@dataclass(frozen=True, slots=True)
class CpuRows:
    """The tokens of a pass, in the form that the CPU's operations need."""

    batch: Batch
    counts: NeuronCounts
    positions: Any  # int64 (m,)
    some_may_skip: bool
    look_up: LookUp | None = None
    _places: dict[CpuKvCache, Any] = field(default_factory=dict)
    _by_sequence: dict[int, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> Any:
        """See Rows."""
        assert self.look_up is not None, "a layer reads tokens"
        return self.look_up(self.batch)

    @property
    def by_sequence(self) -> dict[int, Any]:
        """Indices of each sequence's tokens, int64."""
        if not self._by_sequence:
            found = self.batch.by_sequence().items()
            self._by_sequence.update((sequence, np.array(rows, np.int64)) for sequence, rows in found)
        return self._by_sequence

    def places(self, cache: CpuKvCache) -> Any:
        """Return where the cache holds the keys and values of each token, for all of its layers."""
        if cache not in self._places:
            sequences: Sequence[SequenceCache] = [cache.view(each, sequence_cache) for each in self.batch.sequences]
            positions, paths = self.batch.positions, self.batch.paths
            self._places[cache] = kv_table(sequences, positions, cache_shape(cache), cache.kind, paths)
        return self._places[cache]


def cache_shape(cache: CpuKvCache) -> tuple[int, int, int]:
    """Return (layers, key heads, head_dim). A cache without layers has the shape of one with a single layer."""
    return max(1, cache.n_layers), cache.n_kv_heads, cache.head_dim


def sequence_cache(first: int, *parts: Tensor) -> SequenceCache:
    """Convert a sequence's storage, which begins at position `first`, to the form that the kernels need."""
    arrays = (part.numpy() for part in parts)
    stored = (array.view(np.uint16) if array.dtype == np.float16 else array for array in arrays)
    return SequenceCache(*stored, first=first)
