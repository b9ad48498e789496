"""Read FP8 weights: e4m3 with a scale for each block of 128 x 128, each row or the whole matrix.

A matrix `X.weight` (N, K) is stored as `X.weight`, e4m3, and `X.weight_scale_inv` or `X.weight_scale`. Weights are
multiplied by either of them, although the name from transformers and DeepSeek suggests a division.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.blocks import Blocks, RowBlocks
from hetero_ee.weights.formats.saved_matrix import FLOATS, Layout, StoredMatrix
from hetero_ee.weights.tiles import TILE_COLUMNS

E4M3, E5M2 = "F8_E4M3", "F8_E5M2"
TYPES = (E4M3, E5M2)  # the second is refused
WEIGHT, SCALES = ".weight", (".weight_scale_inv", ".weight_scale")
ENTRY_BITS = 7  # of an int8 value without its sign
NAN = 127  # as a code, without its sign
CHUNK_WEIGHTS = 2**17  # weights per chunk; a dequantized chunk fits the processor's cache


@dataclass(frozen=True, slots=True)
class Fp8Matrix(StoredMatrix):
    """A matrix in FP8. Its tensors' names begin with `module`."""

    def layout(self) -> Layout:
        n_rows, n_columns = self.shape
        rows, columns = self.saved.block_rows, self.saved.group_size
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (n_rows, 1), (n_rows,))
        if rows and columns:
            shapes = ((-(-n_rows // rows), -(-n_columns // columns)),)
        return {WEIGHT: ((E4M3,), self.shape), self._scale: (FLOATS, *shapes)}

    def dequantize(self) -> Tensor:
        values, codes, scales = torch.empty(self.shape), self._codes(), self._scales()
        n_rows = max(1, CHUNK_WEIGHTS // self.shape[1])
        for rows in (slice(first, first + n_rows) for first in range(0, self.shape[0], n_rows)):
            values[rows] = self._scaled(codes[rows], scales[rows])
        return values

    def blocks(self, *, in_8_bits: bool) -> RowBlocks | None:
        """Return the nearest 8-bit blocks; None for 4 bits, or if scales don't cover whole groups of 32 columns.

        Weights in the octave of a block's largest weight and the three octaves below are exact: in units of 2^-6 of its
        power of two they are integers, as e4m3 has four significant bits.
        """
        if not in_8_bits or self.shape[1] % TILE_COLUMNS or self._columns % TILE_COLUMNS:
            return None
        codes, scales = self._codes(), self._scales()

        def rounded(rows: slice | Tensor) -> Blocks:
            entries, units = _rounded(codes[rows])
            each = scales[rows].repeat_interleave(self._columns // TILE_COLUMNS, dim=1)[:, : units.shape[1]]
            return Blocks(entries, units * each, None)

        return RowBlocks(len(codes), rounded, lambda rows: self._scaled(codes[rows], scales[rows]))

    def _scaled(self, codes: Tensor, scales: Tensor) -> Tensor:
        return _values(codes).mul_(scales.repeat_interleave(self._columns, dim=1)[:, : self.shape[1]])

    @property
    def _columns(self) -> int:
        return min(self.saved.group_size or self.shape[1], self.shape[1])

    @property
    def _scale(self) -> str:
        return next(filter(self.has, SCALES), SCALES[0])

    def _codes(self) -> Tensor:
        """Return the e4m3 weights as bytes, uint8 (N, K). Raises CheckpointError for NaN."""
        codes = self.read(WEIGHT).view(torch.uint8)
        if (codes & NAN).amax() == NAN:
            self.finite(WEIGHT)  # raises
        return codes

    def _scales(self) -> Tensor:
        """Return the scale of each row and block of columns, fp32 (N, blocks of columns)."""
        (n_rows, _), scales, rows = self.shape, self.finite(self._scale), self.saved.block_rows
        if rows:
            return scales.repeat_interleave(min(rows, n_rows), dim=0)[:n_rows]
        return scales.view(-1, 1).expand(n_rows, 1)


def _values(codes: Tensor) -> Tensor:
    """Convert e4m3 codes, uint8, to fp32 by moving their bits into fp16, whose exponent bias is larger by 8.

    Needs 0.7 ns per weight, torch's conversion 6 (Zen 4, 2026-11-27).
    """
    signs_and_rest = (codes.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~0x4000)
    return signs_and_rest.view(torch.float16).float().mul_(256.0)


def _rounded(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Round e4m3 codes (n, K) to int8 entries, and return them with each block's unit, 0 for a block of zeros."""
    values = _values(codes).view(len(codes), -1, TILE_COLUMNS)
    largest = values.abs().amax(-1)
    units = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - ENTRY_BITS)
    return (values / units[..., None]).round_().to(torch.int8).flatten(1), units * (largest > 0)
