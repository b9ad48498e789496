"""One section of the sparse FFN (sparse_ffn.py), as one thread computes it.

Of each block the dot products with up, then the sums over down, strips of 128 columns for all
its rows, so that sums stay in registers. While one is computed, the rows of the next are asked for.
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.kernel_files import compiled
from hetero_ee_cpu_ops.lazy import Chunk
from hetero_ee_cpu_ops.row_unit import (
    PAIR_BYTES,
    PAIRS_A_SUM,
    add_pair,
    add_unit,
    add_unpacked_pair,
    add_wide,
    finish_sums,
    finish_wide,
    larger,
    start_sums,
    step_size,
    steps_a_unit,
    store_offsets,
    unpack_pair,
    weigh_pair,
)
from hetero_ee_cpu_ops.rows import UNIT_BYTES, UNIT_COLUMNS
from hetero_ee_cpu_ops.simd.bytes import prefetch_far, word, zeros
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
from hetero_ee_cpu_ops.simd.tuples import store_sums

BLOCK = 64  # neurons whose weights share their steps
PASS_TOKENS = 8  # their rows are read once; more pass after pass
STRIP_GROUPS = 16  # a register of scales
F32, F16 = np.float32(0), np.uint16(0)  # say what a load finds
# Offsets in a chunk's frame, in bytes.
PRODUCTS = 64 * 4  # bytes of one token's h in a block
FACTOR_BYTES = 4 * STRIP_GROUPS
PAIRS = BLOCK // 2
WEIGHT_BYTES = PAIRS * FACTOR_BYTES  # of a token in 16 groups
OFFSET_BYTES = PAIRS // PAIRS_A_SUM * FACTOR_BYTES
NOW, NEXT = 0, 8 * BLOCK
HIDDEN = 16 * BLOCK
FACTORS = HIDDEN + PASS_TOKENS * PRODUCTS
DOTS = FACTORS + PASS_TOKENS * FACTOR_BYTES
WIDE = DOTS + 64
WEIGHTS = WIDE + 512
OFFSETS = WEIGHTS + PASS_TOKENS * WEIGHT_BYTES
UNPACKED = OFFSETS + PASS_TOKENS * OFFSET_BYTES
FRAME_BYTES = UNPACKED + PAIRS * PAIR_BYTES
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
    for at in range(count, BLOCK if count else 0):
        write_integer(word(rows, count - 1), rows + 8 * at)
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
        down = word(arguments, DOWN + CODES) + neuron * UNIT_BYTES * n_units
        down_scales = word(arguments, DOWN + SCALES) + neuron * 4 * n_units
        x = word(arguments, INPUT_CODES) + stride * first
        x_scales = word(arguments, INPUT_SCALES) + scales_stride * first
        totals = zeros(tokens)
        for start in range(0, n_units, STRIP_GROUPS // 2):
            if first == 0:
                prefetch_far(down_scales + 4 * start)
                for line in range(4):
                    prefetch_far(down + UNIT_BYTES * start + 64 * line)
            weights = _scales(scales + 4 * start, word(arguments, UP + SCALES_END))
            for token in range(len(tokens)):
                inputs = load16(x_scales + token * scales_stride + 8 * start, F32)
                store16(multiply(weights, inputs), frame + FACTORS + FACTOR_BYTES * token)
            for unit in range(min(n_units - start, STRIP_GROUPS // 2)):
                totals = add_unit(totals, codes, table, x, stride, frame + FACTORS + 8 * unit)
                codes += UNIT_BYTES
                x += UNIT_COLUMNS
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
    largest = spread(F32)
    for at in range(count):
        row = _scales(scales + word(frame + NOW, at) * row_bytes, end)
        largest = larger(largest, multiply(row, spread(read_float(hidden + 4 * at))))
    steps = steps_a_unit(largest)
    store16(step_size(largest), frame + FACTORS + FACTOR_BYTES * token)
    weights, offsets = frame + WEIGHTS + WEIGHT_BYTES * token, frame + OFFSETS + OFFSET_BYTES * token
    for first in range(0, count, 2 * PAIRS_A_SUM):
        total = spread(F32)
        for at in range(first, min(count, first + 2 * PAIRS_A_SUM), 2):
            one = _scales(scales + word(frame + NOW, at) * row_bytes, end)
            other = _scales(scales + word(frame + NOW, at + 1) * row_bytes, end)
            one = multiply(one, spread(read_float(hidden + 4 * at)))
            other = multiply(other, spread(read_float(hidden + 4 * at + 4)))
            total = weigh_pair(one, other, steps, total, weights)
            weights += FACTOR_BYTES
        store_offsets(total, offsets)
        offsets += FACTOR_BYTES


@compiled(nogil=True)
def _strip(cells: Any, arguments: int, frame: int, count: int, unit: int) -> None:
    """Adds the listed rows' columns from `unit` on, len(cells) / 2 units, to the sums of every token."""
    n_units, n_tokens = word(arguments, N_UNITS), word(arguments, N_TOKENS)
    row_bytes, n_pairs = UNIT_BYTES * n_units, (count + 1) // 2
    codes, table = word(arguments, DOWN + CODES) + UNIT_BYTES * unit, word(arguments, DOWN + TABLE)
    ahead = word(arguments, UP + CODES)
    ahead = (ahead if ahead else word(arguments, DOWN + CODES)) + UNIT_BYTES * unit
    group = 8 * (unit % (STRIP_GROUPS // 2))  # bytes of two groups' values
    out = word(frame + DOTS, 4) + 4 * UNIT_COLUMNS * unit
    if n_tokens > 1:
        for pair in range(n_pairs):
            first, second = word(frame + NOW, 2 * pair), word(frame + NOW, 2 * pair + 1)
            first, second = codes + first * row_bytes, codes + second * row_bytes
            prefetch_far(ahead + word(frame + NEXT, 2 * pair) * row_bytes)
            prefetch_far(ahead + word(frame + NEXT, 2 * pair + 1) * row_bytes)
            unpack_pair(cells, first, second, table, frame + UNPACKED + PAIR_BYTES * pair)
    for token in range(n_tokens):
        weights = frame + WEIGHTS + WEIGHT_BYTES * token + group
        offsets = frame + OFFSETS + OFFSET_BYTES * token + group
        if n_pairs > PAIRS_A_SUM:
            for at in range(0, 512, 64):
                store16(spread(F32), frame + WIDE + at)
        for start in range(0, n_pairs, PAIRS_A_SUM):
            sums = start_sums(cells, offsets)
            for pair in range(start, min(n_pairs, start + PAIRS_A_SUM)):
                if n_tokens > 1:
                    sums = add_unpacked_pair(sums, frame + UNPACKED + PAIR_BYTES * pair, weights)
                else:
                    first, second = word(frame + NOW, 2 * pair), word(frame + NOW, 2 * pair + 1)
                    prefetch_far(ahead + word(frame + NEXT, 2 * pair) * row_bytes)
                    prefetch_far(ahead + word(frame + NEXT, 2 * pair + 1) * row_bytes)
                    sums = add_pair(sums, codes + first * row_bytes, codes + second * row_bytes, table, weights)
                weights += FACTOR_BYTES
            offsets += FACTOR_BYTES
            factors = frame + FACTORS + FACTOR_BYTES * token + group
            if start + PAIRS_A_SUM < n_pairs:
                add_wide(sums, frame + WIDE)
            elif start > 0:
                finish_wide(sums, frame + WIDE, factors, out)
            else:
                finish_sums(sums, factors, out)
        out += word(arguments, SUMS_STRIDE)


def _section(arguments: int, index: int) -> None:
    """The section FIRST_SECTION + index: its sums for every token, and whether there are any."""
    frame = scratch(FRAME_BYTES)
    n_blocks = (word(arguments, N_NEURONS) + BLOCK - 1) // BLOCK
    size, n_units = word(arguments, BLOCKS_A_SECTION), word(arguments, N_UNITS)
    block = (word(arguments, FIRST_SECTION) + index) * size
    end = min(block + size, n_blocks)
    sums = word(arguments, SUMS) + index * word(arguments, N_TOKENS) * word(arguments, SUMS_STRIDE)
    write_integer(sums, frame + DOTS + 32)
    count, block = _next_block(arguments, block, end, frame + NOW)
    write_integer(count, word(arguments, USED) + 8 * index)
    if count:
        for at in range(0, word(arguments, N_TOKENS) * word(arguments, SUMS_STRIDE), 64):
            store16(spread(F32), sums + at)
    while count:
        following, block = _next_block(arguments, block, end, frame + NEXT)
        if following == 0:
            for at in range(BLOCK):
                write_integer(word(frame + NOW, 0), frame + NEXT + 8 * at)
        _hidden(arguments, frame, count)
        if count & 1:
            for token in range(word(arguments, N_TOKENS)):
                write_float(F32, frame + HIDDEN + PRODUCTS * token + 4 * count)
        for start in range(0, n_units, STRIP_GROUPS // 2):
            for token in range(word(arguments, N_TOKENS)):
                _weigh(arguments, frame, count, token, start)
            until = min(start + STRIP_GROUPS // 2, n_units)
            for unit in range(start, until - 1, 2):
                _strip((0, 0, 0, 0), arguments, frame, count, unit)
            if until & 1:
                _strip((0, 0), arguments, frame, count, until - 1)
        for at in range(BLOCK):
            write_integer(word(frame + NEXT, at), frame + NOW + 8 * at)
        count = following


SECTION = Chunk(_section)
