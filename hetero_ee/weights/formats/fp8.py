"""FP8 weights, e4m3 with a scale for each block of 128 x 128, each row or the whole matrix.

A matrix `X.weight` (N, K) is stored as `X.weight`, e4m3, and `X.weight_scale_inv` or `X.weight_scale`. Both are factors
of the weights, although transformers' and DeepSeek's name suggests a divisor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.blocks import Blocks
from hetero_ee.weights.formats.saved_matrix import FLOATS, Layout, StoredMatrix
from hetero_ee.weights.tiles import TILE_COLUMNS

E4M3, E5M2 = "F8_E4M3", "F8_E5M2"
TYPES = (E4M3, E5M2)  # the second is refused
WEIGHT, SCALES = ".weight", (".weight_scale_inv", ".weight_scale")
ENTRY_BITS = 7  # of an int8 value without its sign


@dataclass(frozen=True, slots=True)
class Fp8Matrix(StoredMatrix):
    """A SavedMatrix in FP8; `module` is X."""

    def layout(self) -> Layout:
        n_rows, n_columns = self.shape
        rows, columns = self.saved.block_rows, self.saved.group_size
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (n_rows, 1), (n_rows,))
        if rows and columns:
            shapes = ((-(-n_rows // rows), -(-n_columns // columns)),)
        return {WEIGHT: ((E4M3,), self.shape), self._scale: (FLOATS, *shapes)}

    def dequantize(self) -> Tensor:
        return self._values() * self._scales().repeat_interleave(self._columns, dim=1)[:, : self.shape[1]]

    def blocks(self, *, in_8_bits: bool) -> Blocks | None:
        """Return the nearest 8-bit blocks: the octave of a block's largest weight and the three below are exact.

        e4m3 has four significant bits, so in units of 2^-6 of the largest's power of two those weights are integers.
        """
        if not in_8_bits or self.shape[1] % TILE_COLUMNS or self._columns % TILE_COLUMNS:
            return None
        values = self._values().view(self.shape[0], -1, TILE_COLUMNS)
        largest = values.abs().amax(-1)
        units = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - ENTRY_BITS)
        entries = (values / units[..., None]).round().to(torch.int8).flatten(1)
        scales = self._scales().repeat_interleave(self._columns // TILE_COLUMNS, dim=1)[:, : units.shape[1]]
        return Blocks(entries, units * scales * (largest > 0), None, is_exact=False)

    @property
    def _columns(self) -> int:
        """Number of columns that share a scale."""
        return min(self.saved.group_size or self.shape[1], self.shape[1])

    @property
    def _scale(self) -> str:
        return next(filter(self.has, SCALES), SCALES[0])

    def _values(self) -> Tensor:
        return self.finite(WEIGHT)

    def _scales(self) -> Tensor:
        """Return scales, fp32 (N, blocks of columns)."""
        (n_rows, _), scales, rows = self.shape, self.finite(self._scale), self.saved.block_rows
        if rows:
            return scales.repeat_interleave(min(rows, n_rows), dim=0)[:n_rows]
        return scales.view(-1, 1).expand(n_rows, 1)
