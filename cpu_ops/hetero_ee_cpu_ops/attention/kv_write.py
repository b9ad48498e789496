"""Write the keys and values of m new rows into the KV cache at their slots.

fp32 is copied. fp16 rounds to nearest, ties to even, and clamps to +-65504. int8 uses, for each position and head,
scale = max |x| / 127 and code = round(x / scale), ties to even; a head with all values below 1e-30 is stored as zero,
and inputs must be finite. Layout: kv_table.py. Keys and values are read from fp32 (m, features), the key heads side by
side from feature first_key and the value heads from first_value, so a fused projection is read in place.

8 key heads of 128, m = 1: 0.7 us in all, 0.9 us for int8 (Zen 5, one thread, Nov 2026). Not shared over threads.
"""

from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.attention.kv_table import (
    BRANCH,
    CAPACITY,
    COLUMNS,
    DTYPES,
    KEY_SCALES,
    KEYS,
    PATH,
    POSITION,
)
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import array_in, entry
from hetero_ee_cpu_ops.simd.bytes import word
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

F32, HALF, BYTE = np.float32(0), np.uint16(0), np.int8(0)  # types of a stored value
SMALLEST = np.float32(1e-30)  # 127 / 1e-30 is still a finite fp32


@inner
def _head(source: int, target: int, scale_at: int, n: int, element: Any) -> None:
    """Store one head of n features. `scale_at` is the address of its scale, or 0 if the cache has no scales."""
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
    """Write one layer's keys and values. Return 0, or 1 without writing anything if a shape is wrong."""
    m, total = x.shape
    last = total - n_kv_heads * head_dim
    if table.shape != (m, COLUMNS) or not 0 <= first_key <= last or not 0 <= first_value <= last:
        return 1
    for row in range(m):
        capacity, own = table[row, CAPACITY], table[row, POSITION]
        if table[row, PATH]:
            own = word(table[row, PATH], own - table[row, BRANCH])
        for head in range(n_kv_heads):
            slot = (layer * n_kv_heads + head) * capacity + own
            for part in range(2):
                first = first_value if part else first_key
                source = x.ctypes.data + 4 * (row * total + first + head * head_dim)
                scales = table[row, KEY_SCALES + part]
                target = table[row, KEYS + part] + slot * head_dim * element_bytes(element)
                _head(source, target, scales + 4 * slot if scales else 0, head_dim, element)
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
    """Writes a model's KV cache, one layer per call. `kind` is how it is stored, a key of kv_table.DTYPES."""

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, kind: str) -> None:
        if kind not in DTYPES:
            raise ValueError(f"Unknown KV cache type {kind}; choose one of {', '.join(DTYPES)}.")
        self._n_layers, self._n_kv_heads, self._head_dim = n_layers, n_kv_heads, head_dim
        self._write = FUNCTIONS[kind]

    def write(self, x: Any, table: Any, layer: int, first_key: int, first_value: int) -> None:
        """Write one layer's keys and values of the m rows in x.

        Args:
            x: fp32 (m, features).
            table: kv_table(...) of the m rows.

        Raises:
            ValueError: if a shape, dtype or layout does not fit, or the layer does not exist.
        """
        if not 0 <= layer < self._n_layers:
            raise ValueError(f"Layer {layer} is outside the cache's {self._n_layers} layers.")
        if self._write(x, table, layer, self._n_kv_heads, self._head_dim, first_key, first_value):
            raise ValueError(
                f"Input x {x.shape} and KV table {table.shape} do not fit {self._n_kv_heads} heads of "
                f"{self._head_dim} from features {first_key} and {first_value}."
            )
