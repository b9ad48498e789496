"""An int4 matrix stored row by row, so that sparse_ffn.py and masked_linear.py need not read skipped rows.

Rows have K columns, padded to a multiple of 64 with scales of 0. A unit of 32 bytes holds 64 columns: byte b has the
code of column b in its low nibble and that of column 32 + b in its high nibble. Each group of 32 columns has one scale
per row. value = 2^exponent * scale * codebook[code].
"""

from typing import Any

import numpy as np
from numba.core.registry import cpu_target

from hetero_ee_cpu_ops.tile_kind import NARROW_LIMIT, byte_bias

UNIT_COLUMNS, UNIT_BYTES = 64, 32


class RowMatrix:
    """An int4 matrix of rows, with its addresses prepared for the kernels. Keeps the arrays alive and unchanged.

    Args:
        codes: uint8 (N, 32 * units).
        scales: fp16 (N, 2 * units), finite.
        codebook: 16 integers of -32..32.
        n_columns: K without padding.

    Raises:
        ValueError: if a shape or dtype does not fit, an array is not contiguous, or the codebook is wider.
    """

    def __init__(self, codes: Any, scales: Any, exponent: int, codebook: tuple[int, ...], n_columns: int) -> None:
        n_units = -(-n_columns // UNIT_COLUMNS)
        if n_columns < 1 or codes.ndim != 2 or codes.shape[1] != n_units * UNIT_BYTES or codes.dtype != np.uint8:
            raise ValueError(
                f"Codes are {codes.dtype} {codes.shape}, expected uint8 (N, {n_units * UNIT_BYTES}) "
                f"for {n_columns} columns."
            )
        if scales.shape != (codes.shape[0], 2 * n_units) or scales.dtype != np.float16:
            raise ValueError(
                f"Scales are {scales.dtype} {scales.shape}, expected float16 {(codes.shape[0], 2 * n_units)}."
            )
        if not (codes.flags.c_contiguous and scales.flags.c_contiguous):
            raise ValueError("Codes and scales must be contiguous.")
        if len(codebook) != 16 or max(map(abs, codebook)) > NARROW_LIMIT:
            raise ValueError(f"The codebook must have 16 entries of {-NARROW_LIMIT}..{NARROW_LIMIT}, not {codebook}.")
        self.n_rows, self.n_columns, self.n_units = codes.shape[0], n_columns, n_units
        self.factor = np.float32(2.0**exponent)
        self.n_bytes = codes.nbytes + scales.nbytes
        entries = np.tile(np.array(codebook, np.int8), 4).view(np.uint8)
        self._table = np.concatenate([entries + np.uint8(byte_bias(cpu_target.target_context)), entries])
        self._kept = (codes, scales)
        # For the kernels: addresses of codes, scales, the scales' end and the table; the factor's bits; units.
        end, factor = scales.ctypes.data + scales.nbytes, int(self.factor.view(np.int32))
        words = codes.ctypes.data, scales.ctypes.data, end, self._table.ctypes.data, factor, n_units
        self.words = np.array(words, np.int64)
