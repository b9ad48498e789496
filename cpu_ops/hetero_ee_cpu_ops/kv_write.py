"""Writes the keys and values of m new rows into the KV cache at their positions.

fp32: as they are. fp16: to nearest, ties to even, within +-65504, its range. int8, for each position and head:
scale = max |x| / 127, code = x / scale to nearest, ties to even; a head below 1e-30 everywhere is stored as zero.
Layout: kv_table.py. Keys and values come as fp32 (m, features), the key heads side by side from feature first_key on,
the value heads from first_value on, so that a fused projection is read where it lies. For int8 they must be finite.

8 key heads of 128, m = 1: 0.7 us in all, 0.9 us for int8 (Zen 5, one thread, Nov 2026). Not shared over threads.
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.kernel_files import inner
from hetero_ee_cpu_ops.kv_table import CAPACITY, COLUMNS, DTYPES, KEY_SCALES, KEYS, POSITION
from hetero_ee_cpu_ops.lazy import array_in, entry
from hetero_ee_cpu_ops.simd.floats import (
    element_bytes,
    lane_maximum,
    load_lanes,
    magnitude,
    maximum,
    multiply,
    spread,
    store_lanes,
    write_float,
)

F32, HALF, BYTE = np.float32(0), np.uint16(0), np.int8(0)  # stored as
SMALLEST = np.float32(1e-30)  # 127 / 1e-30 is still a finite fp32


@inner
def _head(source: int, target: int, scale_at: int, n: int, element: Any) -> None:
    """One head of n features; scale_at: where its scale goes, 0 where there is none."""
    inverse = spread(np.float32(1))
    if scale_at:
        greatest = spread(F32)
        for i in range(0, n, 16):
            greatest = maximum(greatest, magnitude(load_lanes(source + 4 * i, 0, min(16, n - i), F32)))
        peak = lane_maximum(greatest)
        small = peak < SMALLEST
        inverse = spread(F32 if small else np.float32(np.float32(127) / peak))
        write_float(F32 if small else np.float32(peak / np.float32(127)), scale_at)
    for i in range(0, n, 16):
        count = min(16, n - i)
        value = load_lanes(source + 4 * i, 0, count, F32)
        if scale_at:
            value = multiply(value, inverse)
        store_lanes(value, target + i * element_bytes(element), count, element)


@inner
def _write(
    x: Any, table: Any, layer: int, n_kv_heads: int, head_dim: int, first_key: int, first_value: int, element: Any
) -> int:
    """1 where a shape is wrong: then nothing has been written."""
    m, total = x.shape
    last = total - n_kv_heads * head_dim
    if table.shape != (m, COLUMNS) or not 0 <= first_key <= last or not 0 <= first_value <= last:
        return 1
    for row in range(m):
        capacity, position = table[row, CAPACITY], table[row, POSITION]
        for head in range(n_kv_heads):
            line = (layer * n_kv_heads + head) * capacity + position
            for part in range(2):
                first = first_value if part else first_key
                source = x.ctypes.data + 4 * (row * total + first + head * head_dim)
                scales = table[row, KEY_SCALES + part]
                target = table[row, KEYS + part] + line * head_dim * element_bytes(element)
                _head(source, target, scales + 4 * line if scales else 0, head_dim, element)
    return 0


SIGNATURE = types.int64(array_in(types.float32, 2), array_in(types.int64, 2), *[types.int64] * 5)


@entry(SIGNATURE)
def _write_fp32(x: Any, table: Any, layer: int, n_kv_heads: int, head_dim: int, key: int, value: int) -> int:
    return _write(x, table, layer, n_kv_heads, head_dim, key, value, F32)


@entry(SIGNATURE)
def _write_fp16(x: Any, table: Any, layer: int, n_kv_heads: int, head_dim: int, key: int, value: int) -> int:
    return _write(x, table, layer, n_kv_heads, head_dim, key, value, HALF)


@entry(SIGNATURE)
def _write_int8(x: Any, table: Any, layer: int, n_kv_heads: int, head_dim: int, key: int, value: int) -> int:
    return _write(x, table, layer, n_kv_heads, head_dim, key, value, BYTE)


FUNCTIONS = {"fp32": _write_fp32, "fp16": _write_fp16, "int8": _write_int8}


class KvWrite:
    """One model's cache, written layer by layer. kind: how it is stored, one of kv_table.DTYPES."""

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, kind: str) -> None:
        if kind not in DTYPES:
            raise ValueError(f"no cache is called {kind}; there are {', '.join(DTYPES)}.")
        self._n_layers, self._n_kv_heads, self._head_dim = n_layers, n_kv_heads, head_dim
        self._write = FUNCTIONS[kind]

    def write(self, x: Any, table: Any, layer: int, first_key: int, first_value: int) -> None:
        """x: fp32 (m, features); table: kv_table's of the m rows.

        Raises ValueError for other shapes, dtypes or layouts, and for a layer that is not there.
        """
        if not 0 <= layer < self._n_layers:
            raise ValueError(f"layer {layer} of {self._n_layers}.")
        if self._write(x, table, layer, self._n_kv_heads, self._head_dim, first_key, first_value):
            raise ValueError(
                f"x {x.shape} and table {table.shape} don't fit {self._n_kv_heads} heads of {self._head_dim} "
                f"from features {first_key} and {first_value} on."
            )
