"""A matrix in blocks of 32, as files of other formats have it, and the tiles that hold the same codes and scales."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import MAX_EXPONENT, MIN_EXPONENT, to_fp16_scales
from hetero_ee.weights.weight import TileWeight

LEAST_VALUE = -127  # int8 tiles have no -128


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """W[n, k] = scales[n, k // 32] x entry: codebook[codes[n, k]], or codes[n, k] itself where that is None.

    codes: uint8 (N, K) with a codebook, else int8; scales: fp32 (N, K / 32).
    """

    codes: Tensor
    scales: Tensor
    codebook: tuple[int, ...] | None

    def entries(self) -> Tensor:
        """int8 (N, K)."""
        if self.codebook is None:
            return self.codes
        return (
            torch.tensor(self.codebook, dtype=torch.int8)
            .index_select(0, self.codes.flatten().int())
            .view_as(self.codes)
        )

    def dequantize(self) -> Tensor:
        """fp32 (N, K)."""
        return self.entries().float() * self.scales.repeat_interleave(layout.TILE_COLUMNS, dim=1)

    def rows(self, order: Tensor) -> "Blocks":
        """The same rows in another order."""
        return Blocks(self.codes[order], self.scales[order], self.codebook)


def int4_tiles(parts: Sequence[Blocks], most: float) -> TileWeight | None:
    """Parts stacked; None where codebooks differ or lack, or fp16 does not hold the scales within `most` of each."""
    codebook = parts[0].codebook
    if codebook is None or any(part.codebook != codebook for part in parts):
        return None
    zero = min(range(16), key=lambda code: abs(codebook[code]))
    return _tiles([part.codes for part in parts], parts, codebook, zero, most)


def int8_tiles(parts: Sequence[Blocks], most: float) -> TileWeight | None:
    """Likewise in 8 bits, of any codebooks; None also where an entry is -128."""
    entries = [part.entries() for part in parts]
    holds = all(int(each.min()) >= LEAST_VALUE for each in entries)
    return _tiles(entries, parts, None, 0, most) if holds else None


def _tiles(
    codes: Sequence[Tensor], parts: Sequence[Blocks], codebook: tuple[int, ...] | None, padding: int, most: float
) -> TileWeight | None:
    """None where fp16 can't hold the scales, together with one power of two, within `most` of each."""
    stacked, scales = torch.cat(list(codes)), torch.cat([part.scales for part in parts])
    n_rows, n_columns = stacked.shape
    n_padding = layout.padded_shape(n_rows, n_columns)[0] - n_rows
    stacked = torch.nn.functional.pad(stacked, (0, 0, 0, n_padding), value=padding)
    found = _fp16_scales(torch.nn.functional.pad(scales, (0, 0, 0, n_padding)), most)
    if found is None:
        return None
    tiles = layout.pack_int8(stacked) if codebook is None else layout.pack_int4(stacked)
    return TileWeight(tiles, layout.pack_scales(found[0]), found[1], codebook, n_rows, n_columns)


def _fp16_scales(scales: Tensor, most: float) -> tuple[Tensor, int] | None:
    """fp16 scales and their exponent, each within `most` of itself."""
    for halves, exponent in (to_fp16_scales(scales, 0), (scales.half(), 0)):
        error = (halves.double() * 2.0**exponent - scales.double()).abs()
        if bool((error <= most * scales.double().abs()).all()) and MIN_EXPONENT <= exponent <= MAX_EXPONENT:
            return halves, exponent
    return None
