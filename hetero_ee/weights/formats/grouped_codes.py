"""Integer matrices with a scale, and perhaps a zero point, per row and group of columns, as in GPTQ, AWQ and
compressed-tensors, which pack them in different orders.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.blocks import LEAST_VALUE, Blocks, RowBlocks
from hetero_ee.weights.tiles import TILE_COLUMNS
from hetero_ee.weights.weight import LINEAR_CODEBOOK

CHUNK_WEIGHTS = 2**20  # dequantized at a time
WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class GroupedCodes:
    """An unpacked matrix: W[n, k] = scales[n, g] x (codes[n, k] - zeros[n, g]) with g = groups[k].

    codes: uint8 (N, K); scales: fp32 (N, G); groups: int64 (K,); zeros: int16 (N, G), None if all are `middle`.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    groups: Tensor
    zeros: Tensor | None = None

    @property
    def middle(self) -> int:
        """Code of a weight of 0 if there are no zero points."""
        return 1 << (self.bits - 1)

    def columns(self, order: Tensor | None) -> "GroupedCodes":
        """Return the matrix with its columns in another order; None keeps the order."""
        if order is None:
            return self
        return GroupedCodes(self.bits, self.codes[:, order], self.scales, self.groups[order], self.zeros)

    def dequantize(self) -> Tensor:
        """Return the matrix as fp32 (N, K)."""
        n_rows, n_columns = self.codes.shape
        values, n_together = torch.empty(n_rows, n_columns), max(1, CHUNK_WEIGHTS // n_columns)
        for first in range(0, n_rows, n_together):
            rows = slice(first, first + n_together)
            whole = self.codes[rows].to(torch.int16)
            whole -= self.middle if self.zeros is None else self.zeros[rows][:, self.groups]
            torch.mul(whole, self.scales[rows][:, self.groups], out=values[rows])
        return values

    def rows(self, rows: slice | Tensor) -> "GroupedCodes":
        zeros = None if self.zeros is None else self.zeros[rows]
        return GroupedCodes(self.bits, self.codes[rows], self.scales[rows], self.groups, zeros)

    def blocks(self, *, in_8_bits: bool) -> RowBlocks | None:
        """Return blocks of 32 columns; None if a block would span two groups, or for 8-bit codes with zero points.

        An entry of -128 becomes -127: about one of 200 weights moves by one unit, a tenth of the error of other scales.
        """
        first = self.groups[::TILE_COLUMNS]
        if self.codes.shape[1] % TILE_COLUMNS or not torch.equal(self.groups, first.repeat_interleave(TILE_COLUMNS)):
            return None
        if self.zeros is not None and self.bits != 4:
            return None
        is_exact = self.bits == 4 or bool(self.codes.min() > 0)
        values = None if is_exact else lambda rows: self.rows(rows).dequantize()
        return RowBlocks(len(self.codes), lambda rows: self.rows(rows)._blocks(first, in_8_bits=in_8_bits), values)

    def _blocks(self, groups: Tensor, *, in_8_bits: bool) -> Blocks:
        """Return the matrix as blocks.

        Args:
            groups: index of the group that holds each block's scale.
        """
        scales = self.scales[:, groups]
        if self.zeros is None:
            if self.bits == 4:
                return Blocks(self.codes, scales, LINEAR_CODEBOOK)
            whole = (self.codes.to(torch.int16) - self.middle).clamp_(min=LEAST_VALUE)
            return Blocks(whole.to(torch.int8), scales, None)
        zeros = self.zeros[:, groups]
        if in_8_bits:
            whole = self.codes.to(torch.int8) - zeros.to(torch.int8).repeat_interleave(TILE_COLUMNS, dim=1)
            return Blocks(whole, scales, None)
        return Blocks(self.codes, scales, LINEAR_CODEBOOK, (zeros - self.middle).float())


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 (a, b) to uint8 (a, b, 32 / bits), the lowest bits first."""
    parts = words.contiguous().view(torch.uint8).view(*words.shape, WORD_BITS // 8)
    return parts if bits == 8 else torch.stack([parts & 15, parts >> 4], dim=-1).flatten(2)


def packed_size(n: int, bits: int) -> int:
    """Return the number of int32 words that hold n codes."""
    return -(-n * bits // WORD_BITS)
