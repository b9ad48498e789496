"""The tile layouts in plain torch: the reference for every kernel. docs/FORMAT.md defines each bit.

W is (N, K) = (out, in), N padded to 16 rows and K to 32 columns, cut into tiles of 16 x 32, row block after row block.
int4 tile, 256 bytes: byte 4r + c of line j holds W[16b+r, 32g+4j+c] in its low nibble and W[16b+r, 32g+16+4j+c] in its
high one (j < 4 lines of 64 bytes, r < 16, c < 4).
int8 tile, 512 bytes: byte 4r + c of line j is W[16b+r, 32g+4j+c] (j < 8).
Scales are stored separately, a tile's 16 side by side; in the layout "int4 zeros" its 16 zero points follow them, so
that one pointer leads to both.
"""

import torch
from torch import Tensor

TILE_ROWS = 16  # one AVX-512 register holds 16 rows x 4 columns, the operand of a VNNI dot product
TILE_COLUMNS = 32  # one scale per row and 32 columns
INT4_TILE_BYTES = 256
INT8_TILE_BYTES = 512
ZEROS = "int4 zeros"
TILE_BYTES = {"int4": INT4_TILE_BYTES, ZEROS: INT4_TILE_BYTES, "int8": INT8_TILE_BYTES}
SCALES_A_TILE = {"int4": TILE_ROWS, ZEROS: 2 * TILE_ROWS, "int8": TILE_ROWS}  # fp16 numbers, zero points included
SCALE_BYTES = 2


def padded_shape(n_rows: int, n_columns: int) -> tuple[int, int]:
    """Return the shape rounded up to whole tiles."""
    n_down, n_across = tile_grid(n_rows, n_columns)
    return n_down * TILE_ROWS, n_across * TILE_COLUMNS


def tile_grid(n_rows: int, n_columns: int) -> tuple[int, int]:
    """Return how many tiles a matrix has vertically and horizontally."""
    return -(-n_rows // TILE_ROWS), -(-n_columns // TILE_COLUMNS)


def region_bytes(layout: str, n_rows: int, n_columns: int) -> tuple[int, int]:
    """Return the number of bytes of a matrix's tiles and of its scales."""
    n_down, n_across = tile_grid(n_rows, n_columns)
    n_tiles = n_down * n_across
    return n_tiles * TILE_BYTES[layout], n_tiles * SCALES_A_TILE[layout] * SCALE_BYTES


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes (N, K), uint8 from 0 to 15, N % 16 == K % 32 == 0, to tiles (N/16, K/32, 256) uint8."""
    halves = codes.view(len(codes), -1, 2, TILE_COLUMNS // 2)
    return pack_lines(halves[:, :, 0] | (halves[:, :, 1] << 4))


def pack_lines(lines: Tensor) -> Tensor:
    """Pack bytes (N, K/32, 16 or 32), N % 16 == 0, to tiles (N/16, K/32, 256 or 512): a line holds 4 bytes per row."""
    words = lines.view(torch.int32).view(-1, TILE_ROWS, *lines.shape[1:2], lines.shape[2] // 4)  # b r g j
    return words.permute(0, 2, 3, 1).contiguous().view(lines.dtype).view(len(words), lines.shape[1], -1)


def unpack_int4(tiles: Tensor) -> Tensor:
    """Unpack tiles (N/16, K/32, 256) uint8 to codes (N, K), uint8 from 0 to 15."""
    return unpack_nibbles(_lines(tiles))


def unpack_nibbles(lines: Tensor) -> Tensor:
    """Unpack the bytes of rows, uint8 (n, K/32, 16), to codes (n, K), uint8 from 0 to 15."""
    return torch.cat([lines & 15, lines >> 4], dim=-1).flatten(1)


def lines_of_rows(tiles: Tensor, indices: Tensor) -> Tensor:
    """Return the packed bytes of some rows (n, K/32, 16 or 32), without unpacking the rest of their tiles."""
    words = _words(tiles)
    return words[indices // TILE_ROWS, :, :, indices % TILE_ROWS].view(tiles.dtype)


def pack_int8(values: Tensor) -> Tensor:
    """Pack values (N, K) int8, N % 16 == K % 32 == 0, to tiles (N/16, K/32, 512) int8."""
    return pack_lines(values.view(len(values), -1, TILE_COLUMNS))


def unpack_int8(tiles: Tensor) -> Tensor:
    """Unpack tiles (N/16, K/32, 512) int8 to values (N, K) int8."""
    return _lines(tiles).flatten(1)


def _lines(tiles: Tensor) -> Tensor:
    """Return the packed bytes of all rows (N, K/32, 16 or 32)."""
    return _words(tiles).permute(0, 3, 1, 2).contiguous().flatten(0, 1).view(tiles.dtype)


def _words(tiles: Tensor) -> Tensor:
    """View tiles as int32 words (N/16, K/32, 4 or 8 lines, 16 rows). A word holds 4 bytes of a row."""
    return tiles.view(torch.int32).view(*tiles.shape[:2], tiles.shape[2] // (4 * TILE_ROWS), TILE_ROWS)


def pack_scales(scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Pack scales (N, K/32) to (N/16, K/32, 16), or scales and zero points to (N/16, K/32, 32), scales first."""
    n_rows, n_groups = scales.shape
    parts = torch.stack([scales] if zeros is None else [scales, zeros]).view(-1, n_rows // 16, 16, n_groups)  # p b r g
    return parts.permute(1, 3, 0, 2).contiguous().view(n_rows // 16, n_groups, -1)


def unpack_scales(scales: Tensor) -> Tensor:
    """Unpack the scales, without zero points, from (N/16, K/32, 16 or 32) to (N, K/32)."""
    return _by_row(scales[..., :TILE_ROWS])


def unpack_zeros(scales: Tensor) -> Tensor | None:
    """Unpack the zero points from (N/16, K/32, 32) to (N, K/32); None if the tiles have none."""
    return _by_row(scales[..., TILE_ROWS:]) if scales.shape[-1] > TILE_ROWS else None


def scales_of_rows(scales: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the scales and zero points of some rows, each (n, K/32); None for the latter if the tiles have none."""
    by_row = scales.view(*scales.shape[:2], scales.shape[2] // TILE_ROWS, TILE_ROWS)  # b g p r
    parts = by_row[indices // TILE_ROWS, :, :, indices % TILE_ROWS]  # n g p
    return parts[:, :, 0], parts[:, :, 1] if parts.shape[2] > 1 else None


def _by_row(numbers: Tensor) -> Tensor:
    n_blocks, n_groups, _ = numbers.shape
    return numbers.permute(0, 2, 1).reshape(n_blocks * 16, n_groups)


def permuted_rows(tiles: Tensor, scales: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return tiles and scales with their rows in the given order, int64 (N,). Padding rows beyond N stay."""
    n_down = len(tiles)
    rows = torch.cat([order, torch.arange(len(order), n_down * TILE_ROWS)])

    def moved(parts: Tensor) -> Tensor:
        split = parts.view(n_down, parts.shape[1], -1, TILE_ROWS).permute(0, 3, 1, 2)
        return split.flatten(0, 1)[rows].view(split.shape).permute(0, 2, 3, 1).reshape(parts.shape).contiguous()

    return moved(tiles.view(torch.int32)).view(tiles.dtype), moved(scales)  # 4 columns of a row are one int32
