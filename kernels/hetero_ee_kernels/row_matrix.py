"""A GPU matrix in int4 rows (docs/FORMAT.md), checked once and ready for the kernels."""

from typing import Any, NamedTuple

import torch

from hetero_ee_kernels.checks import check
from hetero_ee_kernels.tile_matrix import instructions

UNIT_COLUMNS, UNIT_BYTES = 64, 32
LARGEST_ENTRY = 32  # of a codebook, so that a block's sums are exact in fp32


class Skips(NamedTuple):
    """Operands that let a sparse FFN skip neurons that are not 0.

    may_skip: int32 (m,), 0 for tokens that need all neurons; None if all tokens do.
    n_used: int64 (1,), to which the number of active neurons of tokens that may skip is added; or None.
    least: fp32 (N,), below which |active| counts as 0 for tokens that may skip; or None.
    """

    may_skip: Any = None
    n_used: Any = None
    least: Any = None


NO_SKIPS = Skips()


class RowMatrix:
    """An int4 matrix stored row by row. It neither copies nor changes the tensors.

    Args:
        codes: uint8 (N, 32 * units).
        scales: fp16 (N, 2 * units), finite.
        codebook: 16 integers of -32..32.
        n_columns: K without padding.

    Raises:
        ValueError: if a shape, dtype or device does not fit, or a tensor is not contiguous and aligned to 16 bytes.
    """

    def __init__(self, codes: Any, scales: Any, exponent: int, codebook: tuple[int, ...], n_columns: int) -> None:
        n_units = -(-n_columns // UNIT_COLUMNS)
        check("codes", codes, (len(codes), n_units * UNIT_BYTES), torch.uint8)
        check("scales", scales, (len(codes), 2 * n_units), torch.float16)
        if len(codebook) != 16 or max(map(abs, codebook)) > LARGEST_ENTRY:
            raise ValueError(f"The codebook must have 16 entries of {-LARGEST_ENTRY}..{LARGEST_ENTRY}, not {codebook}.")
        self.codes, self.scales, self.codebook = codes, scales, tuple(codebook)
        self.n_rows, self.n_columns, self.n_units = len(codes), n_columns, n_units
        self.words, self.scale_pairs = codes.view(torch.int32), scales.view(torch.int32)
        self.table = torch.tensor(codebook, dtype=torch.int8).view(torch.int32).to(codes.device)
        self.factor = 2.0**exponent
        self.isa = instructions(codes)
        self.n_bytes = codes.nbytes + scales.nbytes
