"""Where each row's keys and values lie: the int64 table that kv_write and attention read.

A row's line is KEYS, VALUES, KEY_SCALES, VALUE_SCALES (addresses of layer 0, scales 0 where there are none), CAPACITY
(positions), POSITION (the row's own). Keys and values of one sequence: (n_layers, n_kv_heads, capacity, head_dim)
contiguous; scales (n_layers, n_kv_heads, capacity). One table serves every layer of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

KEYS, VALUES, KEY_SCALES, VALUE_SCALES, CAPACITY, POSITION, COLUMNS = range(7)
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.uint16), "int8": np.dtype(np.int8)}


@dataclass(frozen=True, slots=True, eq=False)
class SequenceCache:
    """One sequence's room. keys, values: float32, uint16 (fp16 bits) or int8; scales: float32, with int8 only."""

    keys: Any
    values: Any
    key_scales: Any = None
    value_scales: Any = None


def kv_table(caches: Sequence[SequenceCache], positions: Sequence[int], shape: tuple[int, int, int], kind: str) -> Any:
    """The table of m rows: caches[r] and positions[r] are row r's. shape: (n_layers, n_kv_heads, head_dim).

    The table holds addresses: the arrays must live, and stay where they are, for as long as it is used. Raises
    ValueError where a cache has another shape, kind or layout, or a position is beyond its capacity.
    """
    if len(caches) != len(positions):
        raise ValueError(f"{len(caches)} caches for {len(positions)} positions.")
    table = np.empty((len(caches), COLUMNS), np.int64)
    lines: dict[int, tuple[int, ...]] = {}
    for row, (cache, position) in enumerate(zip(caches, positions, strict=True)):
        if id(cache) not in lines:
            lines[id(cache)] = _line(cache, shape, kind)
        table[row, :POSITION] = lines[id(cache)]
        table[row, POSITION] = position
        if not 0 <= position < table[row, CAPACITY]:
            raise ValueError(f"row {row}'s position {position} is not in a cache of {table[row, CAPACITY]} positions.")
    return table


def _line(cache: SequenceCache, shape: tuple[int, int, int], kind: str) -> tuple[int, ...]:
    n_layers, n_kv_heads, head_dim = shape
    if kind not in DTYPES:
        raise ValueError(f"no cache is called {kind}; there are {', '.join(DTYPES)}.")
    capacity = cache.keys.shape[2] if cache.keys.ndim == 4 else 0
    addresses = []
    for part in (cache.keys, cache.values):
        if part.shape != (n_layers, n_kv_heads, capacity, head_dim) or part.dtype != DTYPES[kind]:
            raise ValueError(f"a {kind} cache of {shape} can't be {part.dtype} {part.shape}.")
        addresses.append(_address(part))
    for part in (cache.key_scales, cache.value_scales):
        if (part is None) == (kind == "int8"):
            raise ValueError("an int8 cache has scales, others have none.")
        if part is not None and (part.shape != (n_layers, n_kv_heads, capacity) or part.dtype != np.float32):
            raise ValueError(f"scales of {shape} and {capacity} positions can't be {part.dtype} {part.shape}.")
        addresses.append(0 if part is None else _address(part))
    return (*addresses, capacity)


def _address(part: Any) -> int:
    if not part.flags.c_contiguous:
        raise ValueError("keys, values and scales must be contiguous.")
    return int(part.ctypes.data)
