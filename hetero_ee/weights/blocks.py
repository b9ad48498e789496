"""Matrices in blocks of 32 columns, as other file formats store them, and tiles with the same codes and scales."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import MAX_EXPONENT, MIN_EXPONENT, to_fp16_scales
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight

LEAST_VALUE = -127  # int8 tiles have no -128
HALF_ROUNDING = 2.0**-11  # largest relative rounding error of fp16, except for subnormals
LARGEST_ZERO = 65504.0  # in fp16
SMALL_ZERO = 2.0**-13  # a smaller zero point is practically 0: codes are 1 apart, and fp16 is less precise there


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A matrix with one scale per row and 32 columns: W[n, k] = scales[n, k // 32] x (entry[n, k] - zeros[n, k // 32]).

    Args:
        codes: with a codebook, uint8 (N, K), and the entry is codebook[codes[n, k]]; without, the int8 entries (N, K).
        scales: fp32 (N, K / 32).
        zeros: zero points in units of the entries, fp32 (N, K / 32); None if all are 0.
        is_exact: whether the blocks hold the file's values exactly, and not the nearest ones that blocks can hold.
    """

    codes: Tensor
    scales: Tensor
    codebook: tuple[int, ...] | None
    zeros: Tensor | None = None
    is_exact: bool = True

    @classmethod
    def with_minimums(cls, codes: Tensor, scales: Tensor, minimums: Tensor) -> Self:
        """Return blocks for W[n, k] = scales[n, k // 32] x codes[n, k] - minimums[n, k // 32], codes uint8 of 0 to 15.

        A group whose zero point would exceed fp16, such as one with a scale of 0, keeps only its minimum. A scale or
        minimum that is not finite yields a scale that is not finite.
        """
        zeros = minimums / scales - 8
        is_flat = ~(zeros.abs() <= LARGEST_ZERO) & scales.isfinite()
        if not is_flat.any():
            return cls(codes, scales, LINEAR_CODEBOOK, zeros)
        zero_code = LINEAR_CODEBOOK.index(0)
        codes = torch.where(is_flat.repeat_interleave(layout.TILE_COLUMNS, dim=1), zero_code, codes)
        return cls(codes, torch.where(is_flat, minimums, scales), LINEAR_CODEBOOK, torch.where(is_flat, 1.0, zeros))

    def entries(self) -> Tensor:
        """Return the int8 entries (N, K), looked up in the codebook if there is one."""
        if self.codebook is None:
            return self.codes
        return (
            torch.tensor(self.codebook, dtype=torch.int8)
            .index_select(0, self.codes.flatten().int())
            .view_as(self.codes)
        )

    def dequantize(self) -> Tensor:
        """Return the matrix as fp32 (N, K)."""
        entries = self.entries().float()
        if self.zeros is not None:
            entries -= self.zeros.repeat_interleave(layout.TILE_COLUMNS, dim=1)
        return entries * self.scales.repeat_interleave(layout.TILE_COLUMNS, dim=1)

    def rows(self, order: Tensor) -> "Blocks":
        """Return the rows at the indices `order`."""
        zeros = None if self.zeros is None else self.zeros[order]
        return Blocks(self.codes[order], self.scales[order], self.codebook, zeros, self.is_exact)


@dataclass(frozen=True, slots=True, eq=False)
class KeptCodes:
    """Tiles with the codes of a file. `wanted` holds the values they were rounded from; None if they are exact."""

    weight: TileWeight
    wanted: Sequence[Blocks | Tensor] | None


def int4_tiles(parts: Sequence[Blocks], most: float) -> TileWeight | None:
    """Stack parts to int4 tiles; None if their codebooks differ, or fp16 can't hold scales and zero points.

    Rounding to fp16 may change each by a relative error of at most `most`. Zero points need LINEAR_CODEBOOK.
    """
    codebook = parts[0].codebook
    if codebook is None or any(part.codebook != codebook for part in parts):
        return None
    if codebook != LINEAR_CODEBOOK and any(part.zeros is not None for part in parts):
        return None
    zero = min(range(16), key=lambda code: abs(codebook[code]))
    return _tiles([part.codes for part in parts], parts, codebook, zero, most)


def int8_tiles(parts: Sequence[Blocks], most: float) -> TileWeight | None:
    """Stack parts to int8 tiles like int4_tiles, with any codebooks; None also for zero points or an entry of -128."""
    entries = [part.entries() for part in parts]
    holds = all(int(each.min()) >= LEAST_VALUE for each in entries) and all(part.zeros is None for part in parts)
    return _tiles(entries, parts, None, 0, most) if holds else None


def _tiles(
    codes: Sequence[Tensor], parts: Sequence[Blocks], codebook: tuple[int, ...] | None, padding: int, most: float
) -> TileWeight | None:
    """Pack tiles; None if rounding to fp16 changes a scale or zero point by a relative error of more than `most`."""
    stacked, scales = torch.cat(list(codes)), torch.cat([part.scales for part in parts])
    n_rows, n_columns = stacked.shape
    n_padding = layout.padded_shape(n_rows, n_columns)[0] - n_rows
    stacked = pad(stacked, (0, 0, 0, n_padding), value=padding)
    found = _fp16_scales(pad(scales, (0, 0, 0, n_padding)), most)
    zeros = _stacked_zeros(parts)
    if found is None or (zeros is not None and not _is_near(zeros.half(), zeros, most, SMALL_ZERO)):
        return None
    packed = layout.pack_scales(found[0], None if zeros is None else pad(zeros, (0, 0, 0, n_padding)).half())
    tiles = layout.pack_int8(stacked) if codebook is None else layout.pack_int4(stacked)
    return TileWeight(tiles, packed, found[1], codebook, n_rows, n_columns)


def _stacked_zeros(parts: Sequence[Blocks]) -> Tensor | None:
    """Stack the parts' zero points, with 0 for parts without any; None if no part has any."""
    if all(part.zeros is None for part in parts):
        return None
    return torch.cat([torch.zeros_like(part.scales) if part.zeros is None else part.zeros for part in parts])


def _fp16_scales(scales: Tensor, most: float) -> tuple[Tensor, int] | None:
    """Return fp16 scales and their common exponent, each within a relative error of `most`; None if impossible."""
    for halves, exponent in (to_fp16_scales(scales, 0), (scales.half(), 0)):
        if _is_near(halves.double() * 2.0**exponent, scales, most) and MIN_EXPONENT <= exponent <= MAX_EXPONENT:
            return halves, exponent
    return None


def _is_near(found: Tensor, expected: Tensor, most: float, small: float = 0.0) -> bool:
    """Return whether every error is at most `most` times the expected value, or times `small` if that is larger."""
    error = (found.double() - expected.double()).abs()
    return bool((error <= most * expected.double().abs().clamp_min(small)).all())
