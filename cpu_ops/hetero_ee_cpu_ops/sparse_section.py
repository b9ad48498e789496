"""One section of the sparse FFN (sparse_ffn.py), as one thread computes it.

Of each block the dot products with up, then the sums over down, strips of 128 columns for all
its rows, so that sums stay in registers. While one is computed, the rows of the next are asked for.
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.kernel_files import compiled
from hetero_ee_cpu_ops.lazy import Chunk
from hetero_ee_cpu_ops.row_unit import (
    MOST_UNITS,
    QUAD_BYTES,
    add_quad,
    add_unit,
    add_unpacked_quad,
    finish_sums,
    larger,
    start_sums,
    step_size,
    steps_a_unit,
    store_offsets,
    unpack_quad,
    weigh_quad,
    widest_strip,
)
from hetero_ee_cpu_ops.rows import UNIT_BYTES, UNIT_COLUMNS
from hetero_ee_cpu_ops.simd.bytes import prefetch, prefetch_far, word, zeros
from hetero_ee_cpu_ops.simd.floats import (
    load16,
    load_lanes,
    multiply,
    read_float,
    scratch,
    spread,
    store16,
    write_float,
    write_integer,
)
from hetero_ee_cpu_ops.simd.tuples import load_tile, store_sums

BLOCK = 64  # neurons whose weights share their steps
PASS_TOKENS = 8  # their rows are read once; more pass after pass
STRIP_GROUPS = 16  # a register of scales
STRIP_UNITS = STRIP_GROUPS // 2
AHEAD_BYTES = 64  # of a row of down, asked for into the first level
FOUR = (0,) * 4
F32, F16 = np.float32(0), np.uint16(0)  # say what a load finds
# Offsets in a chunk's frame, in bytes.
PRODUCTS = 64 * 4  # bytes of one token's h in a block
FACTOR_BYTES = 4 * STRIP_GROUPS
QUADS = BLOCK // 4
WEIGHT_BYTES = QUADS * FACTOR_BYTES  # of a token in 16 groups
NOW, NEXT, LINES = 0, 8 * BLOCK, 16 * BLOCK  # this block's and the next one's neurons, this one's rows of down
AHEAD = 8 * BLOCK  # after the latter, rows that the next block begins with, in the same order
CURSOR = 32 * BLOCK  # which of them is asked for, its next strip; strips with each unit
RESULT = CURSOR + 32
HIDDEN = RESULT + 32
FACTORS = HIDDEN + PASS_TOKENS * PRODUCTS
DOTS = FACTORS + PASS_TOKENS * FACTOR_BYTES
WEIGHTS = DOTS + 64
OFFSETS = WEIGHTS + PASS_TOKENS * WEIGHT_BYTES
UNPACKED = OFFSETS + PASS_TOKENS * FACTOR_BYTES
VALUES = UNPACKED + QUADS * QUAD_BYTES * MOST_UNITS
FRAME_BYTES = VALUES + BLOCK * FACTOR_BYTES
# Indices in the argument array: RowMatrix.words of up and of down, then what belongs to both and to the call.
UP, DOWN = 0, 5
CODES, SCALES, SCALES_END, TABLE, FACTOR = range(5)
N_NEURONS, N_UNITS, N_COLUMNS, BLOCKS_A_SECTION, FIRST_SECTION, N_SECTIONS = range(10, 16)
INPUT, ACTIVE, OUTPUT, FIRST_TOKEN, N_TOKENS, INPUT_CODES, INPUT_SCALES, SUMS, USED = range(16, 25)
CODES_STRIDE, SCALES_STRIDE, SUMS_STRIDE, RESULT_FACTOR = range(25, 29)
N_ARGUMENTS = 29


@compiled(nogil=True)
def _next_block(arguments: int, block: int, end: int, rows: int) -> Any:
    """Lists the active neurons of the first block of block .. end - 1 that has any, as int64 at `rows`, which is filled
    up to 64 with the last; returns how many they are, 0 for none, and the block after."""
    n_neurons, n_tokens = word(arguments, N_NEURONS), word(arguments, N_TOKENS)
    active = word(arguments, ACTIVE) + 4 * n_neurons * word(arguments, FIRST_TOKEN)
    count = 0
    while block < end and count == 0:
        for neuron in range(block * BLOCK, min((block + 1) * BLOCK, n_neurons)):
            is_active = False
            for token in range(n_tokens):
                is_active |= read_float(active + 4 * (token * n_neurons + neuron)) != F32
            write_integer(neuron, rows + 8 * count)
            count += is_active
        block += 1
    if count:
        last = word(rows, count - 1)
        for at in range(count, BLOCK):
            write_integer(last, rows + 8 * at)
    return count, block


@compiled(nogil=True)
def _scales(address: int, end: int) -> Any:
    """16 scales as f32x16; nothing is read from `end` on."""
    if address + 2 * STRIP_GROUPS <= end:
        return load16(address, F16)
    return load_lanes(address, 0, (end - address) // 2, F16)


@compiled(nogil=True)
def _products(tokens: Any, arguments: int, frame: int, count: int, first: int) -> None:
    """h of the listed neurons for len(tokens) tokens from `first` on."""
    n_units, n_neurons = word(arguments, N_UNITS), word(arguments, N_NEURONS)
    stride, scales_stride = word(arguments, CODES_STRIDE), word(arguments, SCALES_STRIDE)
    table, factor = word(arguments, UP + TABLE), read_float(arguments + 8 * (UP + FACTOR))
    active = word(arguments, ACTIVE) + 4 * n_neurons * (word(arguments, FIRST_TOKEN) + first)
    for at in range(count):
        neuron = word(frame + NOW, at)
        codes = word(arguments, UP + CODES) + neuron * UNIT_BYTES * n_units
        scales = word(arguments, UP + SCALES) + neuron * 4 * n_units
        soon = word(frame + NOW, min(at + 2, BLOCK - 1))
        scales_soon = word(arguments, UP + SCALES) + soon * 4 * n_units
        soon = word(arguments, UP + CODES) + soon * UNIT_BYTES * n_units
        down = word(arguments, DOWN + CODES) + neuron * UNIT_BYTES * n_units
        down_scales = word(arguments, DOWN + SCALES) + neuron * 4 * n_units
        x = word(arguments, INPUT_CODES) + stride * first
        x_scales = word(arguments, INPUT_SCALES) + scales_stride * first
        totals = zeros(tokens)
        for start in range(0, n_units, STRIP_UNITS):
            if first == 0:
                prefetch_far(down_scales + 4 * start)
                prefetch(scales_soon + 4 * start)
                for line in range(4):
                    prefetch_far(down + UNIT_BYTES * start + 64 * line)
                    prefetch(soon + UNIT_BYTES * start + 64 * line)
            weights = _scales(scales + 4 * start, word(arguments, UP + SCALES_END))
            for token in range(len(tokens)):
                inputs = load16(x_scales + token * scales_stride + 8 * start, F32)
                store16(multiply(weights, inputs), frame + FACTORS + FACTOR_BYTES * token)
            if n_units - start >= STRIP_UNITS:
                for unit in range(STRIP_UNITS):
                    here, factors = x + UNIT_COLUMNS * unit, frame + FACTORS + 8 * unit
                    totals = add_unit(totals, codes + UNIT_BYTES * unit, table, here, stride, factors)
            else:
                for unit in range(n_units - start):
                    here, factors = x + UNIT_COLUMNS * unit, frame + FACTORS + 8 * unit
                    totals = add_unit(totals, codes + UNIT_BYTES * unit, table, here, stride, factors)
            codes += STRIP_UNITS * UNIT_BYTES
            x += STRIP_UNITS * UNIT_COLUMNS
        store_sums(totals, tokens, frame + DOTS, 4)
        for token in range(len(tokens)):
            gate = read_float(active + 4 * (token * n_neurons + neuron))
            dot = read_float(frame + DOTS + 4 * token) * factor
            h = gate * dot if gate != F32 else F32
            write_float(h, frame + HIDDEN + PRODUCTS * (first + token) + 4 * at)


@compiled(nogil=True)
def _hidden(arguments: int, frame: int, count: int) -> None:
    """h of the listed neurons for every token."""
    n_tokens, n_neurons = word(arguments, N_TOKENS), word(arguments, N_NEURONS)
    if word(arguments, UP + CODES) == 0:
        active = word(arguments, ACTIVE) + 4 * n_neurons * word(arguments, FIRST_TOKEN)
        for token in range(n_tokens):
            for at in range(count):
                h = read_float(active + 4 * (token * n_neurons + word(frame + NOW, at)))
                write_float(h, frame + HIDDEN + PRODUCTS * token + 4 * at)
        return
    token = 0
    while n_tokens - token >= 4:
        _products((0, 0, 0, 0), arguments, frame, count, token)
        token += 4
    if n_tokens - token >= 2:
        _products((0, 0), arguments, frame, count, token)
        token += 2
    if n_tokens - token >= 1:
        _products((0,), arguments, frame, count, token)


@compiled(nogil=True)
def _weigh(arguments: int, frame: int, count: int, token: int, start: int) -> None:
    """One token's weights of the listed rows in the 16 groups from unit `start` on."""
    row_bytes, end = 4 * word(arguments, N_UNITS), word(arguments, DOWN + SCALES_END)
    scales, hidden = word(arguments, DOWN + SCALES) + 4 * start, frame + HIDDEN + PRODUCTS * token
    largest, n_rows = spread(F32), (count + 3) & -4
    for at in range(n_rows):
        row = _scales(scales + word(frame + NOW, at) * row_bytes, end)
        row = multiply(row, spread(read_float(hidden + 4 * at)))
        store16(row, frame + VALUES + FACTOR_BYTES * at)
        largest = larger(largest, row)
    steps, total = steps_a_unit(largest), spread(F32)
    store16(step_size(largest), frame + FACTORS + FACTOR_BYTES * token)
    weights = frame + WEIGHTS + WEIGHT_BYTES * token
    for at in range(0, n_rows, 4):
        values = load_tile(FOUR, FOUR, frame + VALUES + FACTOR_BYTES * at, FACTOR_BYTES)
        total = weigh_quad(values, steps, total, weights)
        weights += FACTOR_BYTES
    store_offsets(total, frame + OFFSETS + FACTOR_BYTES * token)


@compiled(nogil=True)
def _clear(address: int, n_bytes: int) -> None:
    for at in range(0, n_bytes, 64):
        store16(spread(F32), address + at)


@compiled(nogil=True)
def _ask(frame: int, n_strips: int, n_units: int) -> None:
    """Asks for so much of the next block's rows, row after row: as memory has them, its prefetcher helps."""
    row, strip = word(frame + CURSOR, 0), word(frame + CURSOR, 1)
    for _ in range(n_units * word(frame + CURSOR, 2)):
        at = word(frame + LINES + AHEAD, min(row, BLOCK - 1)) + UNIT_BYTES * STRIP_UNITS * strip
        for line in range(0, UNIT_BYTES * STRIP_UNITS, 64):
            prefetch_far(at + line)
        strip += 1
        is_next = strip == n_strips
        row, strip = row + is_next, 0 if is_next else strip
    write_integer(row, frame + CURSOR)
    write_integer(strip, frame + CURSOR + 8)


@compiled(nogil=True)
def _units_of_one(cells: Any, arguments: int, frame: int, count: int, unit: int) -> None:
    """Adds the listed rows' columns in len(cells) / 4 units from `unit` on to the sums of the only token."""
    at, here, table = unit % STRIP_UNITS, UNIT_BYTES * unit, word(arguments, DOWN + TABLE)
    weights, lines = frame + WEIGHTS + 8 * at, frame + LINES
    sums = start_sums(cells, frame + OFFSETS + 8 * at)
    for _ in range((count + 3) // 4):
        for row in range(4):
            prefetch(word(lines, row) + here + AHEAD_BYTES)
        sums = add_quad(sums, lines, here, table, weights)
        weights += FACTOR_BYTES
        lines += 32
    finish_sums(sums, frame + FACTORS + 8 * at, word(frame + RESULT, 0) + 4 * UNIT_COLUMNS * unit)


@compiled(nogil=True)
def _units_of_many(cells: Any, arguments: int, frame: int, count: int, unit: int) -> None:
    """The same of every token; entries are unpacked once for all."""
    at, here, n_quads = unit % STRIP_UNITS, UNIT_BYTES * unit, (count + 3) // 4
    unpacked_bytes = QUAD_BYTES * (len(cells) // 4)
    for quad in range(n_quads):
        lines, unpacked = frame + LINES + 32 * quad, frame + UNPACKED + unpacked_bytes * quad
        unpack_quad(cells, lines, here, word(arguments, DOWN + TABLE), unpacked)
    out = word(frame + RESULT, 0) + 4 * UNIT_COLUMNS * unit
    for token in range(word(arguments, N_TOKENS)):
        weights = frame + WEIGHTS + WEIGHT_BYTES * token + 8 * at
        sums = start_sums(cells, frame + OFFSETS + FACTOR_BYTES * token + 8 * at)
        for quad in range(n_quads):
            sums = add_unpacked_quad(sums, frame + UNPACKED + unpacked_bytes * quad, weights)
            weights += FACTOR_BYTES
        finish_sums(sums, frame + FACTORS + FACTOR_BYTES * token + 8 * at, out)
        out += word(arguments, SUMS_STRIDE)


@compiled(nogil=True)
def _units(cells: Any, arguments: int, frame: int, count: int, unit: int) -> None:
    _ask(frame, (word(arguments, N_UNITS) + STRIP_UNITS - 1) // STRIP_UNITS, len(cells) // 4)
    if word(arguments, N_TOKENS) == 1:
        _units_of_one(cells, arguments, frame, count, unit)
    else:
        _units_of_many(cells, arguments, frame, count, unit)


@compiled(nogil=True)
def _block(arguments: int, frame: int, count: int, following: int) -> None:
    """Adds the listed neurons' share to the section's sums; the next block has `following`, 0 for none."""
    n_units, n_tokens = word(arguments, N_UNITS), word(arguments, N_TOKENS)
    _hidden(arguments, frame, count)
    for token in range(n_tokens):
        for at in range(count, (count + 3) & -4):
            write_float(F32, frame + HIDDEN + PRODUCTS * token + 4 * at)
    row_bytes, scale_bytes = UNIT_BYTES * n_units, 4 * n_units
    codes, then = word(arguments, DOWN + CODES), UP if word(arguments, UP + CODES) else DOWN
    ahead, scales_ahead = word(arguments, then + CODES), word(arguments, then + SCALES)
    for at in range(BLOCK):
        write_integer(codes + word(frame + NOW, at) * row_bytes, frame + LINES + 8 * at)
        write_integer(ahead + word(frame + NEXT, at) * row_bytes, frame + LINES + AHEAD + 8 * at)
    n_asked = following * ((n_units + STRIP_UNITS - 1) // STRIP_UNITS)
    write_integer(0, frame + CURSOR)
    write_integer(0, frame + CURSOR + 8)
    write_integer((n_asked + n_units - 1) // n_units, frame + CURSOR + 16)
    for start in range(0, n_units, STRIP_UNITS):
        for token in range(n_tokens):
            _weigh(arguments, frame, count, token, start)
        end = min(start + STRIP_UNITS, n_units)
        for at in range(following):
            prefetch_far(scales_ahead + word(frame + NEXT, at) * scale_bytes + 4 * start)
        unit, cells = start, widest_strip()
        while end - unit >= len(cells) // 4:
            _units(cells, arguments, frame, count, unit)
            unit += len(cells) // 4
        while unit < end:
            _units(FOUR, arguments, frame, count, unit)
            unit += 1


@compiled(nogil=True)
def _copy(source: int, target: int) -> None:
    """A list of neurons."""
    for at in range(0, 8 * BLOCK, 64):
        store16(load16(source + at, F32), target + at)


def _section(arguments: int, index: int) -> None:
    """The section FIRST_SECTION + index: its sums for every token, and whether there are any."""
    frame = scratch(FRAME_BYTES)
    n_blocks = (word(arguments, N_NEURONS) + BLOCK - 1) // BLOCK
    size, sums_bytes = word(arguments, BLOCKS_A_SECTION), word(arguments, N_TOKENS) * word(arguments, SUMS_STRIDE)
    block = (word(arguments, FIRST_SECTION) + index) * size
    end = min(block + size, n_blocks)
    sums = word(arguments, SUMS) + index * sums_bytes
    write_integer(sums, frame + RESULT)
    count, block = _next_block(arguments, block, end, frame + NOW)
    write_integer(count, word(arguments, USED) + 8 * index)
    if count:
        _clear(sums, sums_bytes)
    while count:
        following, block = _next_block(arguments, block, end, frame + NEXT)
        if following == 0:
            _copy(frame + NOW, frame + NEXT)
        _block(arguments, frame, count, following)
        _copy(frame + NEXT, frame + NOW)
        count = following


SECTION = Chunk(_section)
