"""The tile layouts in plain torch: the reference for every kernel. docs/FORMAT.md defines each bit.

W is (N, K) = (out, in), N padded to 16 rows and K to 32 columns, cut into tiles of 16 x 32, row block after row block.
int4 tile, 256 bytes: byte 4r + c of line j holds W[16b+r, 32g+4j+c] in its low nibble and W[16b+r, 32g+16+4j+c] in its
high one (j < 4 lines of 64 bytes, r < 16, c < 4).
int5 tile, 320 bytes: an int4 tile with the codes' low 4 bits, then a line whose byte 4r + c has the fifth bit of
W[16b+r, 32g+4j+c] as bit j (j < 8).
int6 tile, 384 bytes: the same with two lines of high bits, of columns 0 to 15 and 16 to 31, whose byte 4r + c has those
of column 4j + c of its half as bits 2j and 2j + 1 (j < 4).
int8 tile, 512 bytes: byte 4r + c of line j is W[16b+r, 32g+4j+c] (j < 8).
Scales are stored separately, a tile's 16 side by side. In the layouts with zeros its 16 zero points follow them, so
that one pointer leads to both. An int6 tile has 16 scales for columns 0 to 15, then 16 for the others.
"""

import torch
from torch import Tensor

TILE_ROWS = 16  # one AVX-512 register holds 16 rows x 4 columns, the operand of a VNNI dot product
TILE_COLUMNS = 32  # one scale per row and 32 columns
INT4_TILE_BYTES = 256
ZEROS, ZEROS_5 = "int4 zeros", "int5 zeros"
TILE_BYTES = {"int4": INT4_TILE_BYTES, ZEROS: INT4_TILE_BYTES, "int5": 320, ZEROS_5: 320, "int6": 384, "int8": 512}
# fp16 numbers, zero points included.
SCALES_A_TILE = {name: TILE_ROWS * (2 if name in (ZEROS, ZEROS_5, "int6") else 1) for name in TILE_BYTES}
SCALE_BYTES = 2
ENTRY_OFFSETS = {"int5": 16, ZEROS_5: 16, "int6": 32}  # what is subtracted from a code; others have a codebook


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


def layout_of(tiles: Tensor, scales: Tensor) -> str:
    """Return the name of the layout that tiles and scales of these sizes have."""
    sizes = tiles.shape[-1], scales.shape[-1]
    return next(name for name in TILE_BYTES if (TILE_BYTES[name], SCALES_A_TILE[name]) == sizes)


def pack(values: Tensor, name: str) -> Tensor:
    """Pack codes, uint8 (N, K), or int8 entries for layout "int8", to tiles of the layout. N % 16 == K % 32 == 0."""
    if name == "int8":
        return pack_int8(values)
    if TILE_BYTES[name] == INT4_TILE_BYTES:
        return pack_int4(values)
    n_bits = 2 if name == "int6" else 1  # high ones
    tiles, high = pack_int4(values & 15), pack_int8(values >> 4)
    lines = high.view(*high.shape[:2], n_bits, 8 // n_bits, -1)
    shifted = lines << (n_bits * torch.arange(8 // n_bits, dtype=torch.uint8))[:, None]
    return torch.cat([tiles, shifted.sum(3, dtype=torch.uint8).flatten(2)], 2)


def unpack(tiles: Tensor) -> Tensor:
    """Unpack tiles of any layout to codes (N, K), uint8; int8 tiles to entries, int8."""
    return unpack_rows(_lines(tiles))


def unpack_rows(lines: Tensor) -> Tensor:
    """Unpack the bytes of rows (n, K/32, 16, 20, 24 or 32) to codes (n, K), uint8, or int8 entries."""
    if lines.shape[-1] == TILE_COLUMNS:
        return lines.flatten(1)
    low, high = lines[..., :16], lines[..., 16:]
    codes = torch.cat([low & 15, low >> 4], dim=-1).flatten(1)
    if not high.shape[-1]:
        return codes
    n_bits = high.shape[-1] // 4
    places = (n_bits * torch.arange(8 // n_bits, dtype=torch.uint8))[:, None]
    bits: Tensor = high.view(*high.shape[:2], n_bits, 1, 4) >> places & (2**n_bits - 1)
    return codes | bits.flatten(1) << 4


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes (N, K), uint8 from 0 to 15, N % 16 == K % 32 == 0, to tiles (N/16, K/32, 256) uint8."""
    halves = codes.view(len(codes), -1, 2, TILE_COLUMNS // 2)
    return pack_lines(halves[:, :, 0] | (halves[:, :, 1] << 4))


def pack_int8(values: Tensor) -> Tensor:
    """Pack bytes (N, K), N % 16 == K % 32 == 0, to tiles (N/16, K/32, 512)."""
    return pack_lines(values.view(len(values), -1, TILE_COLUMNS))


def pack_lines(lines: Tensor) -> Tensor:
    """Pack bytes (N, K/32, 16 or 32), N % 16 == 0, to tiles (N/16, K/32, 256 or 512): a line holds 4 bytes per row."""
    words = lines.view(torch.int32).view(-1, TILE_ROWS, *lines.shape[1:2], lines.shape[2] // 4)  # b r g j
    return words.permute(0, 2, 3, 1).contiguous().view(lines.dtype).view(len(words), lines.shape[1], -1)


def lines_of_rows(tiles: Tensor, indices: Tensor) -> Tensor:
    """Return the packed bytes of some rows (n, K/32, 16 to 32), without unpacking the rest of their tiles."""
    words = _words(tiles)
    return words[indices // TILE_ROWS, :, :, indices % TILE_ROWS].view(tiles.dtype)


def _lines(tiles: Tensor) -> Tensor:
    """Return the packed bytes of all rows (N, K/32, 16 to 32)."""
    return _words(tiles).permute(0, 3, 1, 2).contiguous().flatten(0, 1).view(tiles.dtype)


def _words(tiles: Tensor) -> Tensor:
    """View tiles as int32 words (N/16, K/32, 4 to 8 lines, 16 rows). A word holds 4 bytes of a row."""
    return tiles.view(torch.int32).view(*tiles.shape[:2], tiles.shape[2] // (4 * TILE_ROWS), TILE_ROWS)


def pack_scales(scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Pack scales (N, K/32) to (N/16, K/32, 16), or scales and zero points to (N/16, K/32, 32), scales first."""
    return pack_numbers(torch.stack([scales] if zeros is None else [scales, zeros], 2))


def pack_numbers(numbers: Tensor) -> Tensor:
    """Pack one or two numbers of each row and group (N, K/32, p) to (N/16, K/32, 16 p)."""
    n_rows, n_groups, _ = numbers.shape
    parts = numbers.permute(2, 0, 1).reshape(-1, n_rows // 16, 16, n_groups)  # p b r g
    return parts.permute(1, 3, 0, 2).contiguous().view(n_rows // 16, n_groups, -1)


def unpack_scales(scales: Tensor) -> Tensor:
    """Unpack the scales, without zero points, from (N/16, K/32, 16 or 32) to (N, K/32)."""
    return _by_row(scales[..., :TILE_ROWS])


def scales_of_rows(scales: Tensor, indices: Tensor | None = None) -> Tensor:
    """Return the numbers of all rows, or of some, (n, K/32, 1 or 2). The second ones are zero points or scales."""
    by_row = scales.view(*scales.shape[:2], scales.shape[2] // TILE_ROWS, TILE_ROWS)  # b g p r
    if indices is None:
        return by_row.permute(0, 3, 1, 2).flatten(0, 1)
    return by_row[indices // TILE_ROWS, :, :, indices % TILE_ROWS]


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
