"""Rotary position embedding, fp32, in place: rotates pairs (i, i + n/2) of the first n features of each head.

x[i]       <- x[i] cos(p f_i) - x[i + n/2] sin(p f_i)
x[i + n/2] <- x[i + n/2] cos(p f_i) + x[i] sin(p f_i)         i < n/2, p the row's position, f_i the inverse frequency
(arXiv 2104.09864, section 3.2; pairing as in Llama). Each product is rounded, as in the torch reference.

Layout: x (m, features) contiguous; heads are side by side from feature `first`, so one call rotates queries and keys
that are side by side. Cosines and sines come from a table by position, computed once in float64 from the fp32 angle:
a position's bits never depend on the batch or on when the table grew. Positions 0..2^24-1, where fp32 angles are
exact. 40 heads of 128, m = 1: 0.8 us in all (Zen 5, one thread, Nov 2026).
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.jit.lazy import array_in, array_out, entry
from hetero_ee_cpu_ops.simd.floats import add, load16, load_lanes, multiply, store16, store_lanes, subtract

F32 = np.float32(0)  # type of a loaded value
FIRST_POSITIONS = 256  # rows of the table at first; it doubles
MAX_POSITIONS = 2**24


@entry(
    types.int64(array_out(types.float32, 2), array_in(types.int64, 1), array_in(types.float32, 3), *[types.int64] * 3)
)
def _rotate(x: Any, positions: Any, table: Any, first: int, n_heads: int, head_dim: int) -> int:
    """Rotate in place. Return 0, or without rotating 1 if a shape is wrong, 2 if the table lacks a position."""
    m, total = x.shape
    half = table.shape[2]
    if positions.size != m or first < 0 or n_heads < 0 or 2 * half > head_dim or first + n_heads * head_dim > total:
        return 1
    for row in range(m):
        if positions[row] < 0:
            return 1
        if positions[row] >= table.shape[0]:
            return 2
    for row in range(m):
        cosines = table.ctypes.data + 8 * half * positions[row]
        sines = cosines + 4 * half
        for head in range(n_heads):
            low = x.ctypes.data + 4 * (row * total + first + head * head_dim)
            high = low + 4 * half
            i = 0
            while i + 16 <= half:
                a, b = load16(low + 4 * i, F32), load16(high + 4 * i, F32)
                c, s = load16(cosines + 4 * i, F32), load16(sines + 4 * i, F32)
                store16(subtract(multiply(a, c), multiply(b, s)), low + 4 * i)
                store16(add(multiply(b, c), multiply(a, s)), high + 4 * i)
                i += 16
            if i < half:
                n = half - i
                a, b = load_lanes(low + 4 * i, 0, n, F32), load_lanes(high + 4 * i, 0, n, F32)
                c, s = load_lanes(cosines + 4 * i, 0, n, F32), load_lanes(sines + 4 * i, 0, n, F32)
                store_lanes(subtract(multiply(a, c), multiply(b, s)), low + 4 * i, n, F32)
                store_lanes(add(multiply(b, c), multiply(a, s)), high + 4 * i, n, F32)
    return 0


class Rope:
    """Rotary embedding operation for one set of frequencies. Threads may share it.

    Args:
        inverse_frequencies: radians per position of each pair.
        magnitude: factor of cosines and sines.
    """

    def __init__(self, inverse_frequencies: Sequence[float], magnitude: float = 1.0) -> None:
        self._magnitude = magnitude
        self._frequencies = np.array(inverse_frequencies, np.float32)
        self._table = np.empty((0, 2, len(inverse_frequencies)), np.float32)
        self._growing = threading.Lock()

    def rotate(self, x: Any, positions: Any, first: int, n_heads: int, head_dim: int) -> None:
        """Rotate x in place.

        Args:
            x: fp32 (m, features).
            positions: int64 (m,).

        Raises:
            ValueError: if a shape, dtype or layout does not fit, or a position is negative or 2^24 or more.
        """
        status = _rotate(x, positions, self._table, first, n_heads, head_dim)
        if status == 2:
            self._grow(int(positions.max()) + 1)
            status = _rotate(x, positions, self._table, first, n_heads, head_dim)
        if status:
            raise ValueError(
                f"x {x.shape} does not hold {n_heads} heads of {head_dim} from feature {first}, of which "
                f"{2 * self._frequencies.size} features rotate, for positions {positions.shape} from 0 on."
            )

    def _grow(self, n_positions: int) -> None:
        """Extend the table of cosines and sines to n_positions. A table in use by another thread stays unchanged."""
        if n_positions > MAX_POSITIONS:
            raise ValueError(f"Position {n_positions - 1} exceeds {MAX_POSITIONS - 1}, the last with exact angles.")
        with self._growing:
            covered = len(self._table)
            end = max(n_positions, 2 * covered, FIRST_POSITIONS)
            angles = np.arange(covered, end, dtype=np.float32)[:, None] * self._frequencies
            waves = np.stack([np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)], axis=1)
            self._table = np.concatenate([self._table, (waves * self._magnitude).astype(np.float32)])
