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
        scales: fp32 (N, K / 32), or (N, K / 16) for one scale per 16 columns.
        zeros: zero points in units of the entries, fp32 (N, K / 32); None if all are 0.
    """

    codes: Tensor
    scales: Tensor
    codebook: tuple[int, ...] | None
    zeros: Tensor | None = None

    @classmethod
    def with_minimums(cls, codes: Tensor, scales: Tensor, minimums: Tensor, n_bits: int = 4) -> Self:
        """Return blocks for W[n, k] = scales[n, k // 32] x codes[n, k] - minimums[n, k // 32], codes uint8 of n_bits.

        A group whose zero point would exceed fp16, such as one with a scale of 0, keeps only its minimum. A scale or
        minimum that is not finite yields a scale that is not finite.
        """
        middle = 2 ** (n_bits - 1)  # the code of entry 0
        zeros = minimums / scales - middle
        is_flat = ~(zeros.abs() <= LARGEST_ZERO) & scales.isfinite()
        if is_flat.any():
            codes = torch.where(is_flat.repeat_interleave(layout.TILE_COLUMNS, dim=1), middle, codes)
            scales, zeros = torch.where(is_flat, minimums, scales), torch.where(is_flat, 1.0, zeros)
        if n_bits == 4:
            return cls(codes, scales, LINEAR_CODEBOOK, zeros)
        return cls(codes.to(torch.int8) - middle, scales, None, zeros)

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
        return entries * self.scales.repeat_interleave(entries.shape[1] // self.scales.shape[1], dim=1)

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


def kept_tiles(name: str, parts: Sequence[RowBlocks], *most: float, workers: Workers = map) -> KeptCodes | None:
    """Stack parts to tiles of layout `name` chunk by chunk, with the parts' codes.

    Args:
        most: largest relative errors by which rounding to fp16 may change a scale or zero point. The first one that
            suffices is used.

    Returns:
        None if the layout can't hold the entries, the scales, or the zero points. int4 holds one codebook, and zero
        points with LINEAR_CODEBOOK; int8 has no entry of -128.
    """
    firsts = [part.rows(slice(0, 1)) for part in parts]
    codebook = firsts[0].codebook if layout.TILE_BYTES[name] == layout.INT4_TILE_BYTES else None
    if codebook is not None and any(first.codebook != codebook for first in firsts):
        return None
    has_zeros = any(first.zeros is not None for first in firsts)
    holds_zeros = name == layout.ZEROS_5 or codebook == LINEAR_CODEBOOK
    if (name.startswith("int4") and codebook is None) or (has_zeros and not holds_zeros):
        return None
    n_rows, n_columns = sum(part.n_rows for part in parts), firsts[0].codes.shape[1]
    n_scales = 2 if name == "int6" else 1
    if any(first.scales.shape[1] > n_columns // layout.TILE_COLUMNS * n_scales for first in firsts):
        return None
    n_down, n_across = layout.tile_grid(n_rows, n_columns)
    n_together = max(1, CHUNK_WEIGHTS // (n_columns * layout.TILE_ROWS))  # rows of tiles per chunk
    dtype = torch.int8 if name == "int8" else torch.uint8
    tiles = torch.empty(n_down, n_across, layout.TILE_BYTES[name], dtype=dtype)

    def packed(first: int) -> tuple[bool, Tensor, Tensor | None]:
        rows = slice(first * layout.TILE_ROWS, (first + n_together) * layout.TILE_ROWS)
        blocks = _rows_of_all(parts, rows)
        codes = _codes(blocks, name, codebook)
        if codes is not None:
            tiles[first : first + n_together] = layout.pack(codes, name)
        scales = [_scales(each, n_columns, n_scales) for each in blocks]
        return codes is not None, torch.cat(scales), _joined([each.zeros for each in blocks], scales)

    fits, scales, zeros = zip(*workers(packed, range(0, n_down, n_together)), strict=True)
    numbers = torch.cat(scales).view(n_rows, -1, n_scales)
    stored = _stored_scales(numbers, _joined(zeros, scales), most) if all(fits) else None
    if stored is None:
        return None
    packed_scales, exponent, is_near = stored
    weight = TileWeight(tiles, packed_scales, exponent, codebook, n_rows, n_columns)
    is_exact = is_near == 0 and all(part.values is None for part in parts)
    return KeptCodes(weight, None if is_exact else parts)


def _codes(blocks: Sequence[Blocks], name: str, codebook: tuple[int, ...] | None) -> Tensor | None:
    """Return the stacked codes of a layout's tiles, padded to whole tiles; None if an entry is out of its range."""
    if codebook is not None:
        return _whole_tiles([each.codes for each in blocks], min(range(16), key=lambda code: abs(codebook[code])))
    entries = _whole_tiles([each.entries() for each in blocks], 0)
    middle = layout.ENTRY_OFFSETS.get(name, 0)
    lowest, highest = (-middle, middle - 1) if middle else (LEAST_VALUE, -LEAST_VALUE)
    if int(entries.min()) < lowest or int(entries.max()) > highest:
        return None
    return (entries + middle).view(torch.uint8) if middle else entries


def _scales(blocks: Blocks, n_columns: int, n_scales: int) -> Tensor:
    """Return the blocks' scales with n_scales per 32 columns (n, g * n_scales)."""
    n_wanted = n_columns // layout.TILE_COLUMNS * n_scales
    return blocks.scales.repeat_interleave(n_wanted // blocks.scales.shape[1], dim=1)


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
    """Return packed fp16 scales (N, K/32, 1 or 2) and zero points, their exponent and the first sufficient tolerance.

    Returns None if no tolerance suffices.
    """
    for most in tolerances:
        found = _fp16_scales(scales, most)
        if found and (zeros is None or _is_near(zeros.half(), zeros, most, SMALL_ZERO)):
            numbers = found[0] if zeros is None else torch.cat([found[0], zeros.half()[..., None]], 2)
            return layout.pack_numbers(pad(numbers, (0, 0, 0, 0, 0, -len(scales) % layout.TILE_ROWS))), found[1], most
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
