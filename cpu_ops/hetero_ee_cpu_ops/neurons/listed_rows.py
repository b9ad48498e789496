"""Multiplies listed rows of an int4 matrix, 16 at a time, by the activations of up to 8 tokens.

The rows may be anywhere in the matrix; the next ones are prefetched meanwhile. sparse_section.py and masked_linear.py
share these functions, and the beginning of their argument arrays and of their chunks' frames.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.core.registry import cpu_target

from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.neurons.row_unit import add_unit, unpack_scales
from hetero_ee_cpu_ops.neurons.rows import UNIT_BYTES, UNIT_COLUMNS
from hetero_ee_cpu_ops.quantize import (
    BYTES_PER_GROUP,
    CODE_SCALES,
    CODES,
    GROUP,
    N_COLUMNS,
    OFFSETS_8,
    OFFSETS_32,
    OFFSETS_128,
    OFFSETS_HALVES,
    ROW_BLOCK,
    quantize_row_block,
)
from hetero_ee_cpu_ops.simd.bytes import prefetch_far, word, zeros
from hetero_ee_cpu_ops.simd.floats import load16, load_lanes, write_integer
from hetero_ee_cpu_ops.tile_kind import adds_in_16_bits

TILE, BLOCK = 16, 128  # rows that are multiplied together, and the most whose addresses a frame holds
PASS_TOKENS = 8  # tokens that share one read of the rows
STRIP_GROUPS = 16  # one vector register of scales
STRIP_UNITS = STRIP_GROUPS // 2
F32 = np.float32(0)  # type of a loaded value
AHEAD, PIECE = 64, 256  # rows that are prefetched ahead of use; bytes that are prefetched at once
# Offsets in a chunk's frame, in bytes.
CURSOR, N_BEGUN, LIMIT = 0, 16, 24  # next address to prefetch and its row's end; rows begun, and rows to begin by now
ROWS, N_ROWS = 32, 40  # address and length of the list
LINES = 64  # addresses of 16 or up to BLOCK rows' codes
SCALE_LINES = LINES + 8 * BLOCK  # addresses of 16 rows' scales
SCALES = SCALE_LINES + 8 * TILE  # fp32 scales: here 16 groups of 16 rows
# Indices in the argument array: RowMatrix.words of the first and the second matrix; quantize.py's begin at 12.
FIRST, SECOND = 0, 5
ROW_CODES, SCALE_BITS, SCALES_END, TABLE, FACTOR = range(5)
N_NEURONS, N_UNITS, FIRST_TOKEN, N_TOKENS, INPUT_OFFSETS, OFFSET_BYTES, LISTS = 10, 11, *range(20, 25)
OTHERS = 25  # first index of arguments that only one operation has


def workspace_bytes(n_units: int, n_tokens: int) -> int:
    """Return the bytes that the quantized activations of a pass need, as laid out by place_codes."""
    return 2 * n_units * n_tokens * BYTES_PER_GROUP


@cache
def offset_bytes() -> int:
    """Return the size of a group's offset in the form that add_unit reads."""
    return 8 if adds_in_16_bits(cpu_target.target_context) else 4


@inner
def place_codes(arguments: Any, workspace: int, n_tokens: int) -> None:
    """Write to `arguments` where quantized activations will be in the workspace, for passes of up to n_tokens."""
    n_groups = 2 * arguments[N_UNITS] * n_tokens
    arguments[N_COLUMNS] = UNIT_COLUMNS * arguments[N_UNITS]
    arguments[CODES] = workspace
    arguments[CODE_SCALES] = workspace + GROUP * n_groups
    arguments[OFFSETS_8] = arguments[CODE_SCALES] + 4 * n_groups
    arguments[OFFSETS_128] = arguments[OFFSETS_8] + 4 * n_groups
    arguments[OFFSETS_32] = arguments[OFFSETS_128] + 4 * n_groups
    arguments[OFFSETS_HALVES] = arguments[OFFSETS_32] + 8 * n_groups
    arguments[INPUT_OFFSETS] = arguments[OFFSETS_32 if arguments[OFFSET_BYTES] == 8 else OFFSETS_128]


def whole_units(x: Any, n_units: int) -> Any:
    """Pad x with zero columns to whole units."""
    if x.shape[1] == n_units * UNIT_COLUMNS:
        return x
    padded = np.zeros((x.shape[0], n_units * UNIT_COLUMNS), np.float32)
    padded[:, : x.shape[1]] = x
    return padded


def _quantize(arguments: int, index: int) -> None:
    quantize_row_block((0,), arguments, index, word(arguments, N_TOKENS), 2 * word(arguments, N_UNITS), 0)


QUANTIZE = Chunk(_quantize)


@inner
def load_prefix(address: int, count: int) -> Any:
    """Load 16 fp32 lanes. Only the first `count` are read from memory; the others are 0."""
    return load16(address, F32) if count >= 16 else load_lanes(address, 0, count, F32)


@inner
def begin_list(frame: int, rows: int, count: int) -> None:
    """Store a new list of `count` row numbers at address `rows` in the frame, with nothing prefetched yet."""
    write_integer(rows, frame + ROWS)
    write_integer(count, frame + N_ROWS)
    for at in (CURSOR, CURSOR + 8, N_BEGUN, LIMIT):
        write_integer(0, frame + at)


@inner
def prefetch_rows(arguments: int, frame: int, n_pieces: int) -> None:
    """Prefetch n_pieces of the next listed rows, first of the first matrix, then of the second.

    Rows are prefetched one after the other, since sequential addresses help the hardware prefetcher.
    """
    at, end = word(frame + CURSOR, 0), word(frame + CURSOR, 1)
    n_units, n_listed = word(arguments, N_UNITS), word(frame + N_ROWS, 0)
    for _ in range(n_pieces):
        if at >= end:
            row = word(frame + N_BEGUN, 0)
            if row >= word(frame + LIMIT, 0):
                break
            is_first = row < n_listed and word(arguments, FIRST + ROW_CODES) != 0
            matrix = arguments + 8 * (FIRST if is_first else SECOND)
            number = word(word(frame + ROWS, 0), row if row < n_listed else row - n_listed)
            for offset in range(0, 4 * n_units, 64):
                prefetch_far(word(matrix, SCALE_BITS) + number * 4 * n_units + offset)
            at = word(matrix, ROW_CODES) + number * UNIT_BYTES * n_units
            end = at + UNIT_BYTES * n_units
            write_integer(row + 1, frame + N_BEGUN)
        for offset in range(0, PIECE, 64):
            prefetch_far(at + offset)
        at += PIECE
    write_integer(at, frame + CURSOR)
    write_integer(end, frame + CURSOR + 8)


@inner
def prefetch_first_tile(arguments: int, frame: int) -> None:
    """Prefetch the first 16 rows of a list."""
    n_units = word(arguments, N_UNITS)
    write_integer(min(word(frame + N_ROWS, 0), TILE), frame + LIMIT)
    prefetch_rows(arguments, frame, TILE * ((n_units * UNIT_BYTES + PIECE - 1) // PIECE))


@inner
def select_rows(arguments: int, frame: int, at: int, n_listed: int) -> None:
    """Select 16 listed rows from index `at` on for multiply_rows. Rows up to n_listed may be prefetched meanwhile."""
    n_units, rows = word(arguments, N_UNITS), word(frame + ROWS, 0)
    codes, scales = word(arguments, FIRST + ROW_CODES), word(arguments, FIRST + SCALE_BITS)
    for row in range(TILE):
        number = word(rows, at + row)
        write_integer(codes + number * UNIT_BYTES * n_units, frame + LINES + 8 * row)
        write_integer(scales + number * 4 * n_units, frame + SCALE_LINES + 8 * row)
    write_integer(min(at + TILE + AHEAD, n_listed), frame + LIMIT)


@inner
def inputs(arguments: int, token: int, unit: int) -> Any:
    """Return the addresses of a token's codes, scales and offsets in a unit, and the tokens stored side by side."""
    top = token & -ROW_BLOCK
    r = min(ROW_BLOCK, word(arguments, N_TOKENS) - top)
    number = 2 * (top * word(arguments, N_UNITS) + r * unit) + token - top
    offset = word(arguments, INPUT_OFFSETS) + word(arguments, OFFSET_BYTES) * number
    return word(arguments, CODES) + GROUP * number, word(arguments, CODE_SCALES) + 4 * number, offset, r


@inner
def multiply_rows(tokens: Any, arguments: int, frame: int, first: int) -> Any:
    """Multiply the 16 selected rows by len(tokens) tokens from `first` on. The products lack the factor 2^exponent."""
    n_units, table = word(arguments, N_UNITS), word(arguments, FIRST + TABLE)
    offset_bytes = word(arguments, OFFSET_BYTES)
    x, scale, offset, r = inputs(arguments, first, 0)
    totals = zeros(tokens)
    for start in range(0, n_units, STRIP_UNITS):
        n = min(STRIP_UNITS, n_units - start)
        unpack_scales(frame + SCALE_LINES, 4 * start, n, frame + SCALES)
        for unit in range(n):
            if unit & 1 == 0:
                prefetch_rows(arguments, frame, 6)  # four would equal the bytes read meanwhile
            here, scales = UNIT_BYTES * (start + unit), frame + SCALES + 2 * 64 * unit
            totals = add_unit(totals, frame + LINES, here, table, scales, x, scale, offset, r)
            x += 2 * GROUP * r
            scale += 8 * r
            offset += 2 * offset_bytes * r
    return totals
