"""The row layout: an int4 matrix row by row, so that rows which a token does not need are not read.

W is (N, K), K padded to 64 columns. Unit u of a row, 32 bytes, has column 64u + b in the low nibble of byte b and
column 64u + 32 + b in the high one. A row is an FFN's neuron: a row of up, a column of down. See docs/FORMAT.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hetero_ee.weights.tiles import TILE_COLUMNS, unpack, unpack_scales
from hetero_ee.weights.weight import TileWeight

UNIT_COLUMNS = 64
LARGEST_ENTRY = 32  # limit of a codebook's entries, so that sums of 16 products fit in 16 bits


def row_sizes(n_rows: int, n_columns: int) -> tuple[int, int]:
    """Return the number of bytes of a matrix's codes and of its scales in the row layout."""
    n_padded = -(-n_columns // UNIT_COLUMNS) * UNIT_COLUMNS
    return n_rows * n_padded // 2, n_rows * n_padded // TILE_COLUMNS * 2


def pack_rows(codes: Tensor) -> Tensor:
    """Pack codes (N, K), uint8 from 0 to 15, K a multiple of 64, to bytes (N, K/2)."""
    halves = codes.view(len(codes), -1, 2, UNIT_COLUMNS // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def unpack_rows(packed: Tensor) -> Tensor:
    """Unpack bytes (N, K/2) to codes (N, K), uint8 from 0 to 15."""
    units = packed.view(len(packed), -1, UNIT_COLUMNS // 2)
    return torch.stack([units & 15, units >> 4], dim=2).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class RowWeight:
    """A matrix in rows: W[n, k] = 2^exponent x scales[n, k // 32] x codebook[code[n, k]], as in TileWeight.

    codes: uint8 (N, Kp/2), scales: fp16 (N, Kp/32), Kp = K padded to 64. codebook: 16 of -32..32, ascending.
    """

    codes: Tensor
    scales: Tensor
    exponent: int
    codebook: tuple[int, ...]
    n_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.n_columns

    @property
    def n_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        return self._expand(self.codes, self.scales)

    def rows(self, indices: Tensor) -> Tensor:
        return self._expand(self.codes[indices], self.scales[indices])

    def _expand(self, codes: Tensor, scales: Tensor) -> Tensor:
        entries = torch.tensor(self.codebook, dtype=torch.float32)[unpack_rows(codes).int()]
        factors = scales.float() * 2.0**self.exponent
        expanded = entries.view(*factors.shape, TILE_COLUMNS) * factors[:, :, None]
        return expanded.view(len(codes), -1)[:, : self.n_columns]


def in_rows(weight: TileWeight) -> RowWeight:
    """Convert tiles to rows with the same codes and scales. Raises ValueError if the codebook is too wide for rows."""
    codebook = weight.codebook
    if codebook is None or max(map(abs, codebook)) > LARGEST_ENTRY:
        raise ValueError(f"Rows need a codebook of -{LARGEST_ENTRY} to {LARGEST_ENTRY}.")
    codes = unpack(weight.tiles)[: weight.n_rows]
    scales = unpack_scales(weight.scales)[: weight.n_rows]
    n_groups = row_sizes(1, weight.n_columns)[1] // 2
    more = n_groups - scales.shape[1]
    packed = pack_rows(pad(codes, (0, TILE_COLUMNS * more)))
    return RowWeight(packed, pad(scales, (0, more)), weight.exponent, codebook, weight.n_columns)
