"""The int64 table that gives kv_write and attention the addresses of each row's keys and values.

Columns of a row: KEYS, VALUES, KEY_SCALES, VALUE_SCALES (addresses of layer 0; scales 0 if there are none), CAPACITY
(slots), POSITION (the row's own), PATH and BRANCH. A position's slot is its own number, but for a row of a draft tree
the slots of positions BRANCH .. POSITION are listed at the address PATH, int64; PATH is 0 for other rows. Addresses are
where slot 0 would be: the memory may begin at a later one. Keys and values of one sequence are (n_layers, n_kv_heads,
capacity, head_dim), contiguous; scales (n_layers, n_kv_heads, capacity). One table serves every layer of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KEYS, VALUES, KEY_SCALES, VALUE_SCALES, CAPACITY, POSITION, PATH, BRANCH, COLUMNS = range(9)
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


def kv_table(
    caches: Sequence[SequenceCache],
    positions: Sequence[int],
    shape: tuple[int, int, int],
    kind: str,
    paths: Sequence[Sequence[int]] = (),
) -> Any:
    """Return the table for m rows, row r at positions[r] of caches[r].

    The table holds addresses, so the arrays must stay alive and in place while it is used.

    Args:
        shape: (n_layers, n_kv_heads, head_dim).
        kind: a key of DTYPES.
        paths: by row of a draft tree, the slots of its last positions, its own included; () for other rows.

    Raises:
        ValueError: if a cache has another shape, kind or layout, or a slot is outside its capacity.
    """
    if len(caches) != len(positions):
        raise ValueError(f"A KV table needs one cache per position, not {len(caches)} caches for {len(positions)}.")
    memory = np.zeros(len(caches) * COLUMNS + sum(map(len, paths)), np.int64)
    table, listed = memory[: len(caches) * COLUMNS].reshape(-1, COLUMNS), len(caches) * COLUMNS
    for row, path in enumerate(paths):
        if path:
            memory[listed : listed + len(path)] = path
            table[row, PATH:] = memory.ctypes.data + 8 * listed, positions[row] + 1 - len(path)
            listed += len(path)
    columns: dict[int, tuple[int, ...]] = {}
    for row, (cache, position) in enumerate(zip(caches, positions, strict=True)):
        if id(cache) not in columns:
            columns[id(cache)] = _columns(cache, shape, kind)
        table[row, :POSITION] = columns[id(cache)]
        table[row, POSITION] = position
        path = paths[row] if paths and paths[row] else (position,)
        if not cache.first <= min(path) <= max(path) < cache.first + table[row, CAPACITY]:
            raise ValueError(
                f"A slot of {tuple(path)} of row {row} is outside a KV cache of {table[row, CAPACITY]} slots from "
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
