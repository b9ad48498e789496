"""Rows that are listed meet the activations of up to 8 tokens, 16 rows at a time, wherever they lie.

The rows that come next are asked for meanwhile. sparse_section.py and masked_linear.py share this, and how their
arguments and their chunks' frames begin.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.core.registry import cpu_target

from hetero_ee_cpu_ops.kernel_files import inner
from hetero_ee_cpu_ops.lazy import Chunk
from hetero_ee_cpu_ops.quantize import (
    BYTES_A_GROUP,
    CODE_SCALES,
    CODES,
    GROUP,
    N_COLUMNS,
    OFFSETS_8,
    OFFSETS_32,
    OFFSETS_128,
    ROW_BLOCK,
    quantize_row_block,
)
from hetero_ee_cpu_ops.row_unit import add_unit, unpack_scales
from hetero_ee_cpu_ops.rows import UNIT_BYTES, UNIT_COLUMNS
from hetero_ee_cpu_ops.simd.bytes import prefetch_far, word, zeros
from hetero_ee_cpu_ops.simd.floats import load16, load_lanes, write_integer
from hetero_ee_cpu_ops.tile_group import adds_in_16_bits

TILE, BLOCK = 16, 128  # rows that meet up together, and the most whose addresses a frame holds
PASS_TOKENS = 8  # rows are read once for them
STRIP_GROUPS = 16  # a register of scales
STRIP_UNITS = STRIP_GROUPS // 2
F32 = np.float32(0)  # says what a load finds
AHEAD, PIECE = 64, 256  # rows that are asked for before they are needed; bytes that are asked for at once
# Offsets in a chunk's frame, in bytes.
CURSOR, ASKED, LIMIT = 0, 16, 24  # what to ask for next and where its row ends; rows asked for, and to ask for by now
ROWS, N_ROWS = 32, 40  # the list and its length
LINES = 64  # addresses of rows' codes
SCALE_LINES = LINES + 8 * BLOCK  # of 16 rows' scales
SCALES = SCALE_LINES + 8 * TILE  # as fp32: 16 groups of 16 rows, or what the frame's owner makes of it
# Indices in the argument array: RowMatrix.words of the first and the second matrix, quantize.py's from 12 on, others.
FIRST, SECOND = 0, 5
ROW_CODES, SCALE_BITS, SCALES_END, TABLE, FACTOR = range(5)
N_NEURONS, N_UNITS, FIRST_TOKEN, N_TOKENS, INPUT_OFFSETS, OFFSET_BYTES, LISTS = 10, 11, *range(19, 24)
OTHERS = 24  # from here on


def workspace_bytes(n_units: int, n_tokens: int) -> int:
    """Of the activations of a pass as place_codes places them."""
    return 2 * n_units * n_tokens * BYTES_A_GROUP


@cache
def offset_bytes() -> int:
    """Of a group's offset as add_unit reads it."""
    return 8 if adds_in_16_bits(cpu_target.target_context) else 4


@inner
def place_codes(arguments: Any, workspace: int, n_tokens: int) -> None:
    """Says where a pass's activations lie once they are quantized; n_tokens: of the largest pass."""
    n_groups = 2 * arguments[N_UNITS] * n_tokens
    arguments[N_COLUMNS] = UNIT_COLUMNS * arguments[N_UNITS]
    arguments[CODES] = workspace
    arguments[CODE_SCALES] = workspace + GROUP * n_groups
    arguments[OFFSETS_8] = arguments[CODE_SCALES] + 4 * n_groups
    arguments[OFFSETS_128] = arguments[OFFSETS_8] + 4 * n_groups
    arguments[OFFSETS_32] = arguments[OFFSETS_128] + 4 * n_groups
    arguments[INPUT_OFFSETS] = arguments[OFFSETS_32 if arguments[OFFSET_BYTES] == 8 else OFFSETS_128]


def whole_units(x: Any, n_units: int) -> Any:
    """x with zeros up to whole units."""
    if x.shape[1] == n_units * UNIT_COLUMNS:
        return x
    padded = np.zeros((x.shape[0], n_units * UNIT_COLUMNS), np.float32)
    padded[:, : x.shape[1]] = x
    return padded


def _quantize(arguments: int, index: int) -> None:
    quantize_row_block(arguments, index, word(arguments, N_TOKENS), 2 * word(arguments, N_UNITS))


QUANTIZE = Chunk(_quantize)


@inner
def load_first(address: int, count: int) -> Any:
    """16 fp32, zeros from the count on, which are not read."""
    return load16(address, F32) if count >= 16 else load_lanes(address, 0, count, F32)


@inner
def begin_list(frame: int, rows: int, count: int) -> None:
    """None of the list's rows has been asked for."""
    write_integer(rows, frame + ROWS)
    write_integer(count, frame + N_ROWS)
    for at in (CURSOR, CURSOR + 8, ASKED, LIMIT):
        write_integer(0, frame + at)


@inner
def ask(arguments: int, frame: int, n_pieces: int) -> None:
    """Asks for pieces of the rows that come next, of the first matrix and then of the second, row after row: as memory
    has them, its prefetcher helps."""
    at, end = word(frame + CURSOR, 0), word(frame + CURSOR, 1)
    n_units, n_listed = word(arguments, N_UNITS), word(frame + N_ROWS, 0)
    for _ in range(n_pieces):
        if at >= end:
            row = word(frame + ASKED, 0)
            if row >= word(frame + LIMIT, 0):
                break
            is_first = row < n_listed and word(arguments, FIRST + ROW_CODES) != 0
            matrix = arguments + 8 * (FIRST if is_first else SECOND)
            number = word(word(frame + ROWS, 0), row if row < n_listed else row - n_listed)
            for line in range(0, 4 * n_units, 64):
                prefetch_far(word(matrix, SCALE_BITS) + number * 4 * n_units + line)
            at = word(matrix, ROW_CODES) + number * UNIT_BYTES * n_units
            end = at + UNIT_BYTES * n_units
            write_integer(row + 1, frame + ASKED)
        for line in range(0, PIECE, 64):
            prefetch_far(at + line)
        at += PIECE
    write_integer(at, frame + CURSOR)
    write_integer(end, frame + CURSOR + 8)


@inner
def ask_for_tile(arguments: int, frame: int) -> None:
    """Asks for the first 16 rows, before any is needed."""
    n_units = word(arguments, N_UNITS)
    write_integer(min(word(frame + N_ROWS, 0), TILE), frame + LIMIT)
    ask(arguments, frame, TILE * ((n_units * UNIT_BYTES + PIECE - 1) // PIECE))


@inner
def point_at(arguments: int, frame: int, at: int, n_asked: int) -> None:
    """Makes the 16 rows from the list's `at` on those that meet; of n_asked rows those that come next are asked for."""
    n_units, rows = word(arguments, N_UNITS), word(frame + ROWS, 0)
    codes, scales = word(arguments, FIRST + ROW_CODES), word(arguments, FIRST + SCALE_BITS)
    for row in range(TILE):
        number = word(rows, at + row)
        write_integer(codes + number * UNIT_BYTES * n_units, frame + LINES + 8 * row)
        write_integer(scales + number * 4 * n_units, frame + SCALE_LINES + 8 * row)
    write_integer(min(at + TILE + AHEAD, n_asked), frame + LIMIT)


@inner
def inputs(arguments: int, token: int, unit: int) -> Any:
    """Where a unit's codes, scales and offsets of a token lie, and how many tokens' lie side by side there."""
    top = token & -ROW_BLOCK
    r = min(ROW_BLOCK, word(arguments, N_TOKENS) - top)
    entry = 2 * (top * word(arguments, N_UNITS) + r * unit) + token - top
    offset = word(arguments, INPUT_OFFSETS) + word(arguments, OFFSET_BYTES) * entry
    return word(arguments, CODES) + GROUP * entry, word(arguments, CODE_SCALES) + 4 * entry, offset, r


@inner
def meet(tokens: Any, arguments: int, frame: int, first: int) -> Any:
    """The products, without the factor, of the 16 rows that meet with len(tokens) tokens from `first` on."""
    n_units, table, offset_bytes = (
        word(arguments, N_UNITS),
        word(arguments, FIRST + TABLE),
        word(arguments, OFFSET_BYTES),
    )
    x, scale, offset, r = inputs(arguments, first, 0)
    totals = zeros(tokens)
    for start in range(0, n_units, STRIP_UNITS):
        n = min(STRIP_UNITS, n_units - start)
        unpack_scales(frame + SCALE_LINES, 4 * start, n, frame + SCALES)
        for unit in range(n):
            if unit & 1 == 0:
                ask(arguments, frame, 6)  # four would be as many as are read
            here, scales = UNIT_BYTES * (start + unit), frame + SCALES + 2 * 64 * unit
            totals = add_unit(totals, frame + LINES, here, table, scales, x, scale, offset, r)
            x += 2 * GROUP * r
            scale += 8 * r
            offset += 2 * offset_bytes * r
    return totals
