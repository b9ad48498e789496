"""Matrices in blocks of 32 columns, as other file formats store them, and tiles with the same codes and scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import MAX_EXPONENT, MIN_EXPONENT, Workers, to_fp16_scales
from hetero_ee.weights.weight import LINEAR_CODEBOOK, TileWeight

LEAST_VALUE = -127  # int8 tiles have no -128
HALF_ROUNDING = 2.0**-11  # largest relative rounding error of fp16, except for subnormals
LARGEST_ZERO = 65504.0  # in fp16
CHUNK_WEIGHTS = 2**18  # weights per chunk, about; an unpacked chunk fits the processor's cache
SMALL_ZERO = 2.0**-13  # a smaller zero point is practically 0: codes are 1 apart, and fp16 is less precise there


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A matrix with one scale per row and 32 columns: W[n, k] = scales[n, k // 32] x (entry[n, k] - zeros[n, k // 32]).

    Args:
        codes: with a codebook, uint8 (N, K), and the entry is codebook[codes[n, k]]; without, the int8 entries (N, K).
        scales: fp32 (N, K / 32).
        zeros: zero points in units of the entries, fp32 (N, K / 32); None if all are 0.
    """

    codes: Tensor
    scales: Tensor
    codebook: tuple[int, ...] | None
    zeros: Tensor | None = None

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

    def rows(self, rows: slice | Tensor) -> "Blocks":
        zeros = None if self.zeros is None else self.zeros[rows]
        return Blocks(self.codes[rows], self.scales[rows], self.codebook, zeros)


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks:
    """A matrix that is unpacked to blocks a few rows at a time, so that memory never holds all codes unpacked.

    Attributes:
        rows: returns the blocks of some rows.
        values: returns some rows with the file's values, fp32, if blocks only approximate them; None if they are exact.
    """

    n_rows: int
    rows: Callable[[slice | Tensor], Blocks]
    values: Callable[[Tensor], Tensor] | None = None

    def reordered(self, order: Tensor) -> "RowBlocks":
        """Return the matrix with its rows in the order of the indices `order`."""
        values = self.values
        reordered = None if values is None else lambda rows: values(order[rows])
        return RowBlocks(len(order), lambda rows: self.rows(order[rows]), reordered)

    def file_values(self, rows: Tensor) -> Tensor:
        """Return some rows with the file's values, fp32."""
        return self.rows(rows).dequantize() if self.values is None else self.values(rows)


@dataclass(frozen=True, slots=True, eq=False)
class KeptCodes:
    """Tiles, of which most keep a file's codes.

    Attributes:
        wanted: the parts whose values the tiles approximate; None if the tiles are exact.
    """

    weight: TileWeight
    wanted: Sequence[RowBlocks | Tensor] | None


def int4_tiles(parts: Sequence[RowBlocks], *most: float, workers: Workers = map) -> KeptCodes | None:
    """Stack parts to int4 tiles.

    Args:
        most: largest relative errors by which rounding to fp16 may change a scale or zero point. The first one that
            suffices is used.

    Returns:
        None if the codebooks differ, zero points come with another codebook than LINEAR_CODEBOOK, or fp16 can't hold
        the scales and zero points.
    """
    firsts = [part.rows(slice(0, 1)) for part in parts]
    codebook = firsts[0].codebook
    if codebook is None or any(first.codebook != codebook for first in firsts):
        return None
    if codebook != LINEAR_CODEBOOK and any(first.zeros is not None for first in firsts):
        return None
    zero = min(range(16), key=lambda code: abs(codebook[code]))

    def pack(blocks: Sequence[Blocks]) -> Tensor:
        return layout.pack_int4(_whole_tiles([each.codes for each in blocks], zero))

    return _kept(parts, pack, codebook, most, workers)


def int8_tiles(parts: Sequence[RowBlocks], *most: float, workers: Workers = map) -> KeptCodes | None:
    """Stack parts to int8 tiles like int4_tiles, with any codebooks; None also for zero points or an entry of -128."""
    if any(part.rows(slice(0, 1)).zeros is not None for part in parts):
        return None

    def pack(blocks: Sequence[Blocks]) -> Tensor | None:
        entries = _whole_tiles([each.entries() for each in blocks], 0)
        return layout.pack_int8(entries) if int(entries.min()) >= LEAST_VALUE else None

    return _kept(parts, pack, None, most, workers)


def _kept(
    parts: Sequence[RowBlocks],
    pack: Callable[[Sequence[Blocks]], Tensor | None],
    codebook: tuple[int, ...] | None,
    most: Sequence[float],
    workers: Workers,
) -> KeptCodes | None:
    """Pack tiles chunk by chunk; None if `pack` refuses one, or rounding changes a scale or zero point by too much."""
    n_rows, n_columns = sum(part.n_rows for part in parts), parts[0].rows(slice(0, 1)).codes.shape[1]
    n_down, n_across = layout.tile_grid(n_rows, n_columns)
    n_together = max(1, CHUNK_WEIGHTS // (n_columns * layout.TILE_ROWS))  # rows of tiles per chunk
    name, dtype = ("int8", torch.int8) if codebook is None else ("int4", torch.uint8)
    tiles = torch.empty(n_down, n_across, layout.TILE_BYTES[name], dtype=dtype)

    def packed(first: int) -> tuple[bool, Tensor, Tensor | None]:
        rows = slice(first * layout.TILE_ROWS, (first + n_together) * layout.TILE_ROWS)
        blocks = _rows_of_all(parts, rows)
        found = pack(blocks)
        if found is not None:
            tiles[first : first + n_together] = found
        scales = [each.scales for each in blocks]
        return found is not None, torch.cat(scales), _joined([each.zeros for each in blocks], scales)

    fits, scales, zeros = zip(*workers(packed, range(0, n_down, n_together)), strict=True)
    stored = _stored_scales(torch.cat(scales), _joined(zeros, scales), most) if all(fits) else None
    if stored is None:
        return None
    packed_scales, exponent, is_near = stored
    weight = TileWeight(tiles, packed_scales, exponent, codebook, n_rows, n_columns)
    is_exact = is_near == 0 and all(part.values is None for part in parts)
    return KeptCodes(weight, None if is_exact else parts)


def _rows_of_all(parts: Sequence[RowBlocks], rows: slice) -> list[Blocks]:
    """Return the blocks of some rows of the stacked parts."""
    found, start = [], 0
    for part in parts:
        first, end = max(rows.start - start, 0), min(rows.stop - start, part.n_rows)
        if first < end:
            found.append(part.rows(slice(first, end)))
        start += part.n_rows
    return found


def _whole_tiles(codes: Sequence[Tensor], padding: int) -> Tensor:
    """Stack codes, and append rows of `padding` up to whole tiles."""
    stacked = torch.cat(list(codes))
    n_missing = -len(stacked) % layout.TILE_ROWS
    return pad(stacked, (0, 0, 0, n_missing), value=padding) if n_missing else stacked


def _joined(zeros: Sequence[Tensor | None], scales: Sequence[Tensor]) -> Tensor | None:
    """Stack zero points, with 0 for parts that have none; None if no part has any."""
    if all(each is None for each in zeros):
        return None
    both = zip(zeros, scales, strict=True)
    return torch.cat([torch.zeros_like(scale) if zero is None else zero for zero, scale in both])


def _stored_scales(
    scales: Tensor, zeros: Tensor | None, tolerances: Sequence[float]
) -> tuple[Tensor, int, float] | None:
    """Return packed fp16 scales and zero points, the exponent and the first sufficient tolerance; None if none is."""
    missing = 0, 0, 0, -len(scales) % layout.TILE_ROWS
    halves = None if zeros is None else pad(zeros.half(), missing)
    for most in tolerances:
        found = _fp16_scales(pad(scales, missing), most)
        if found and (zeros is None or _is_near(zeros.half(), zeros, most, SMALL_ZERO)):
            return layout.pack_scales(found[0], halves), found[1], most
    return None


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
