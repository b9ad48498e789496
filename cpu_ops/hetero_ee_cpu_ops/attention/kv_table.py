"""The int64 table that gives kv_write and attention the addresses of each row's keys and values.

Columns of a row: KEYS, VALUES, KEY_SCALES, VALUE_SCALES (addresses of layer 0; scales 0 if there are none), CAPACITY
(slots) and POSITION (the row's own). Addresses are where position 0 would be: the memory may begin at a later one. Keys
and values of one sequence are (n_layers, n_kv_heads, capacity, head_dim), contiguous; scales (n_layers, n_kv_heads,
capacity). One table serves every layer of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KEYS, VALUES, KEY_SCALES, VALUE_SCALES, CAPACITY, POSITION, COLUMNS = range(7)
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.uint16), "int8": np.dtype(np.int8)}


@dataclass(frozen=True, slots=True, eq=False)
class SequenceCache:
    """KV cache memory of one sequence: float32, uint16 (fp16 bits) or int8, with float32 scales only for int8.

    It begins at position `first`; no row may see earlier ones.
    """

    keys: Any
    values: Any
    key_scales: Any = None
    value_scales: Any = None
    first: int = field(default=0, kw_only=True)


def kv_table(caches: Sequence[SequenceCache], positions: Sequence[int], shape: tuple[int, int, int], kind: str) -> Any:
    """Return the table for m rows, row r at positions[r] of caches[r].

    The table holds addresses, so the arrays must stay alive and in place while it is used.

    Args:
        shape: (n_layers, n_kv_heads, head_dim).
        kind: a key of DTYPES.

    Raises:
        ValueError: if a cache has another shape, kind or layout, or a position is outside its capacity.
    """
    if len(caches) != len(positions):
        raise ValueError(f"A KV table needs one cache per position, not {len(caches)} caches for {len(positions)}.")
    table = np.empty((len(caches), COLUMNS), np.int64)
    columns: dict[int, tuple[int, ...]] = {}
    for row, (cache, position) in enumerate(zip(caches, positions, strict=True)):
        if id(cache) not in columns:
            columns[id(cache)] = _columns(cache, shape, kind)
        table[row, :POSITION] = columns[id(cache)]
        table[row, POSITION] = position
        if not cache.first <= position < cache.first + table[row, CAPACITY]:
            raise ValueError(
                f"Position {position} of row {row} is outside a KV cache of {table[row, CAPACITY]} slots from "
                f"{cache.first} on."
            )
    return table


def _columns(cache: SequenceCache, shape: tuple[int, int, int], kind: str) -> tuple[int, ...]:
    n_layers, n_kv_heads, head_dim = shape
    if kind not in DTYPES:
        raise ValueError(f"Unknown KV cache type {kind}; choose one of {', '.join(DTYPES)}.")
    capacity = cache.keys.shape[2] if cache.keys.ndim == 4 else 0
    addresses = []
    for part in (cache.keys, cache.values):
        if part.shape != (n_layers, n_kv_heads, capacity, head_dim) or part.dtype != DTYPES[kind]:
            raise ValueError(f"Keys or values of {part.dtype} {part.shape} do not fit a {kind} cache of {shape}.")
        addresses.append(_address(part) - cache.first * head_dim * part.itemsize)
    for part in (cache.key_scales, cache.value_scales):
        if (part is None) == (kind == "int8"):
            raise ValueError(f"An int8 KV cache needs scales and no other has them; this one is {kind}.")
        if part is not None and (part.shape != (n_layers, n_kv_heads, capacity) or part.dtype != np.float32):
            expected = (n_layers, n_kv_heads, capacity)
            raise ValueError(f"KV scales are {part.dtype} {part.shape}, expected float32 {expected}.")
        addresses.append(0 if part is None else _address(part) - cache.first * part.itemsize)
    return (*addresses, capacity)


def _address(part: Any) -> int:
    if not part.flags.c_contiguous:
        raise ValueError("Keys, values and scales of a KV cache must be contiguous.")
    return int(part.ctypes.data)
