"""Activations to int8: for each row and group of 32 columns, a = max|x| / 127, q = round(x / a), ties to even.

Layout: rows in blocks of 8 (the last may be shorter, r rows), and within a block group after group, the group's r rows
side by side: codes (G, r, 32), scales and offsets (G, r). So a matmul of 8 rows reads one stream; whole rows one after
the other, a power of two apart, would meet in one set of the L1 cache (m = 16 took twice the time, Zen 5, 2026-11-21).
A row's codes depend on that row alone; a group of zeros has scale 0. Also -8 sum(q) and -128 sum(q), which the matmuls
add because their instructions want unsigned weights. Source: derived; the same grouping as the weights' scales.
"""

from typing import Any

import numpy as np
from numba import njit

from hetero_ee_cpu_ops.simd import float_of_bits


GROUP = 32
ROW_BLOCK = 8  # the widest step of the matmul
SMALLEST = np.float32(1e-30)  # below it 127 / max|x| is no number; such a group counts as zeros


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _quantize(x: Any, bits: Any, codes: Any, scales: Any, offsets_8: Any, offsets_128: Any) -> None:
    """x (m, K) and its bits as int32; codes (m * G * 32) with zeros in the padding; the others (m * G)."""
    n_rows, n_columns = x.shape
    n_groups = scales.shape[0] // n_rows
    for row in range(n_rows):
        top = row - row % ROW_BLOCK
        r = min(ROW_BLOCK, n_rows - top)
        for group in range(n_groups):
            place = top * n_groups + group * r + row - top
            first = group * GROUP
            end = min(first + GROUP, n_columns)
            magnitude = np.int32(0)  # bits of magnitudes order like the magnitudes, and integers vectorise
            for column in range(first, end):
                magnitude = max(magnitude, bits[row, column] & np.int32(0x7FFFFFFF))
            largest = float_of_bits(np.int64(magnitude))
            inverse = np.float32(127) / largest if largest > SMALLEST else np.float32(0)
            total = np.int32(0)
            for column in range(first, end):
                code = np.int32(np.rint(x[row, column] * inverse))
                codes[place * GROUP + column - first] = code
                total += code
            scales[place] = largest / np.float32(127) if largest > SMALLEST else np.float32(0)
            offsets_8[place] = -8 * total
            offsets_128[place] = -128 * total


class Activations:
    """m rows of activations quantized once, for every matrix that multiplies them.

    codes: int8 (m * G * 32); scales: fp32 (m * G), in the order above. Raises ValueError unless x is contiguous fp32 (m, K).
    """

    def __init__(self, x: Any) -> None:
        if x.ndim != 2 or x.dtype != np.float32 or not x.flags.c_contiguous:
            raise ValueError(f"activations are {x.dtype} {x.shape}, expected contiguous float32 (m, K).")
        self.n_rows, n_columns = x.shape
        self.n_groups = -(-n_columns // GROUP)
        self.codes = np.zeros(self.n_rows * self.n_groups * GROUP, np.int8)
        self.scales = np.empty(self.n_rows * self.n_groups, np.float32)
        self._offsets = np.empty((2, self.n_rows * self.n_groups), np.int32)
        _quantize(x, x.view(np.int32), self.codes, self.scales, self._offsets[0], self._offsets[1])
        self.codes_address = self.codes.ctypes.data
        self.scales_address = self.scales.ctypes.data
        self.offsets_8 = self._offsets.ctypes.data
        self.offsets_128 = self.offsets_8 + self._offsets[0].nbytes

    def dequantized(self) -> Any:
        """The values the codes stand for, float64 (m, G * 32): what a matmul of these activations is measured against."""
        values = self.codes.reshape(-1, GROUP) * self.scales.astype(np.float64)[:, None]
        blocks, size = [], self.n_groups * ROW_BLOCK
        for first in range(0, len(values), size):
            block = values[first : first + size].reshape(self.n_groups, -1, GROUP)
            blocks.append(block.transpose(1, 0, 2).reshape(-1, self.n_groups * GROUP))
        return np.concatenate(blocks)
