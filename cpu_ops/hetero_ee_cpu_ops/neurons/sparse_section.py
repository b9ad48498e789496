"""One thread's share of the sparse FFN (sparse_ffn.py): a few sections.

First the sections' active neurons are listed. Then h is computed for 16 of them at a time, across blocks. Then the
blocks are added up one by one, in strips of 8 units whose sums stay in registers. Meanwhile the next rows, of up and
then of down, are prefetched.
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.jit.kernel_files import compiled, inner
from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.neurons.listed_rows import (
    AHEAD,
    BLOCK,
    FACTOR,
    FIRST,
    FIRST_TOKEN,
    LIMIT,
    LINES,
    LISTS,
    N_NEURONS,
    N_ROWS,
    N_TOKENS,
    N_UNITS,
    OTHERS,
    PASS_TOKENS,
    ROW_CODES,
    ROWS,
    SCALE_BITS,
    SCALES,
    SCALES_END,
    SECOND,
    STRIP_GROUPS,
    STRIP_UNITS,
    TABLE,
    TILE,
    begin_list,
    load_prefix,
    multiply_rows,
    prefetch_first_tile,
    prefetch_rows,
    select_rows,
)
from hetero_ee_cpu_ops.neurons.row_sums import (
    add_quad,
    finish_sums,
    has_many_registers,
    largest_of_quad,
    step_size,
    steps_per_unit,
    store_offsets,
    weigh_quad,
)
from hetero_ee_cpu_ops.neurons.row_unit import gate_rows
from hetero_ee_cpu_ops.neurons.rows import UNIT_BYTES, UNIT_COLUMNS
from hetero_ee_cpu_ops.simd.bytes import lowest_bit, nonzero_lanes, word, zeros
from hetero_ee_cpu_ops.simd.floats import (
    load16,
    load_lanes,
    read_float,
    scratch,
    spread,
    store16,
    write_float,
    write_integer,
)

ONE, TWO, FOUR, EIGHT, SIXTEEN = (0,), (0,) * 2, (0,) * 4, (0,) * 8, (0,) * 16
F32, F16 = np.float32(0), np.uint16(0)  # types of a loaded value
# Byte offsets in a chunk's frame, after listed_rows.py's.
FACTOR_BYTES = 4 * STRIP_GROUPS
WEIGHT_BYTES = BLOCK // 4 * FACTOR_BYTES  # of a token in 16 groups
UNIT_SUMS = 4 * UNIT_COLUMNS
RESULT = 48  # address of the section's sums
HIDDEN = SCALES + BLOCK * FACTOR_BYTES
FACTORS = HIDDEN + PASS_TOKENS * 4 * BLOCK
OFFSETS = FACTORS + PASS_TOKENS * FACTOR_BYTES
WEIGHTS = OFFSETS + PASS_TOKENS * FACTOR_BYTES
FRAME_BYTES = WEIGHTS + PASS_TOKENS * WEIGHT_BYTES
# Indices in the argument array, after listed_rows.py's.
UP, DOWN = FIRST, SECOND
N_COLUMNS, BLOCKS_PER_SECTION, FIRST_SECTION, N_SECTIONS, ACTIVE, OUTPUT, SUMS, USED = range(OTHERS, OTHERS + 8)
SUMS_STRIDE, RESULT_FACTOR, SECTIONS_PER_CHUNK = range(OTHERS + 8, OTHERS + 11)
N_ARGUMENTS = OTHERS + 11


@compiled(nogil=True)
def list_bytes(n_neurons: int, n_tokens: int) -> int:
    """Return the size of a list of n_neurons, in whole tiles: int64 neuron numbers, then fp32 h for each token."""
    return (8 + 4 * n_tokens) * n_neurons


@inner
def _list(arguments: int, first: int, end: int, rows: int, hidden: int, stride: int) -> int:
    """List the neurons of first .. end - 1 that are active for any token, with every token's activations.

    Both are padded to whole tiles, with the last neuron and zeros. Returns the number of neurons without padding.
    """
    n_neurons, n_tokens, count = word(arguments, N_NEURONS), word(arguments, N_TOKENS), 0
    active = word(arguments, ACTIVE) + 4 * n_neurons * word(arguments, FIRST_TOKEN)
    for start in range(first, end, 16):
        bits = 0
        for token in range(n_tokens):
            bits |= nonzero_lanes(load_prefix(active + 4 * (token * n_neurons + start), end - start))
        while bits:
            neuron = start + lowest_bit(bits)
            bits &= bits - 1
            write_integer(neuron, rows + 8 * count)
            for token in range(n_tokens):
                write_float(read_float(active + 4 * (token * n_neurons + neuron)), hidden + stride * token + 4 * count)
            count += 1
    for at in range(count, (count + TILE - 1) & -TILE):
        write_integer(word(rows, count - 1), rows + 8 * at)
        for token in range(n_tokens):
            write_float(F32, hidden + stride * token + 4 * at)
    return count


@inner
def _scales(address: int, end: int) -> Any:
    """Load 16 fp16 scales as f32x16. Memory from `end` on is not read."""
    if address + 2 * STRIP_GROUPS <= end:
        return load16(address, F16)
    return load_lanes(address, 0, (end - address) // 2, F16)


@inner
def _products(tokens: Any, arguments: int, frame: int, first: int, hidden: int, stride: int) -> None:
    """Turn the 16 selected neurons' activations at `hidden` into h, for len(tokens) tokens from `first` on."""
    totals = multiply_rows(tokens, arguments, frame, first)
    gate_rows(totals, read_float(arguments + 8 * (UP + FACTOR)), hidden + stride * first, stride)


@inner
def _compute_hidden(arguments: int, frame: int, count: int, hidden: int, stride: int) -> None:
    """Turn the activations of all listed neurons into h."""
    n_tokens = word(arguments, N_TOKENS)
    prefetch_first_tile(arguments, frame)
    for at in range(0, count, TILE):
        select_rows(arguments, frame, at, 2 * count)
        h, token = hidden + 4 * at, 0
        if n_tokens >= 8:
            _products(EIGHT, arguments, frame, 0, h, stride)
            token = 8
        if n_tokens - token >= 4:
            _products(FOUR, arguments, frame, token, h, stride)
            token += 4
        if n_tokens - token >= 2:
            _products(TWO, arguments, frame, token, h, stride)
            token += 2
        if n_tokens - token >= 1:
            _products(ONE, arguments, frame, token, h, stride)


@inner
def _weigh(frame: int, n_rows: int, token: int) -> None:
    """Compute one token's int8 weights of a block's rows, in the 16 groups whose scales are at SCALES."""
    scales, hidden = frame + SCALES, frame + HIDDEN + 4 * BLOCK * token
    largest, total = spread(F32), spread(F32)
    for row in range(0, n_rows, 4):
        largest = largest_of_quad(largest, scales + FACTOR_BYTES * row, hidden + 4 * row)
    steps = steps_per_unit(largest)
    store16(step_size(largest), frame + FACTORS + FACTOR_BYTES * token)
    weights = frame + WEIGHTS + WEIGHT_BYTES * token
    for row in range(0, n_rows, 4):
        total = weigh_quad(total, steps, scales + FACTOR_BYTES * row, hidden + 4 * row, weights)
        weights += FACTOR_BYTES
    store_offsets(total, frame + OFFSETS + FACTOR_BYTES * token)


@inner
def _units(cells: Any, tokens: Any, arguments: int, frame: int, n_rows: int, unit: int, token: int) -> None:
    """Add the block's weighted rows to len(tokens) tokens' sums, for len(cells) vectors from `unit` on."""
    at, here, table = unit % STRIP_UNITS, UNIT_BYTES * unit, word(arguments, DOWN + TABLE)
    weights, lines, sums = frame + WEIGHTS + WEIGHT_BYTES * token + 8 * at, frame + LINES, zeros(cells)
    for first in range(0, n_rows, 32):
        n_quads = (min(32, n_rows - first) + 3) // 4
        prefetch_rows(arguments, frame, n_quads)
        for _ in range(n_quads):
            sums = add_quad(sums, tokens, lines, here, table, weights, WEIGHT_BYTES)
            weights += FACTOR_BYTES
            lines += 32
    groups, stride = frame + FACTOR_BYTES * token + 8 * at, word(arguments, SUMS_STRIDE)
    out = word(frame + RESULT, 0) + stride * token + UNIT_SUMS * unit
    finish_sums(sums, tokens, groups + OFFSETS, groups + FACTORS, out, stride)


@inner
def _strip(arguments: int, frame: int, n_rows: int, start: int) -> None:
    """Add the block's weighted rows to every token's sums, for the units of the strip that begins at `start`."""
    n_tokens, end, token = word(arguments, N_TOKENS), min(start + STRIP_UNITS, word(arguments, N_UNITS)), 0
    while has_many_registers() and n_tokens - token >= 2:
        several = n_tokens - token >= 4
        for unit in range(start, end):
            if several:
                _units(SIXTEEN, FOUR, arguments, frame, n_rows, unit, token)
            else:
                _units(EIGHT, TWO, arguments, frame, n_rows, unit, token)
        token += 4 if several else 2
    for each in range(token, n_tokens):
        unit = start
        while has_many_registers() and end - unit >= 2:
            _units(EIGHT, ONE, arguments, frame, n_rows, unit, each)
            unit += 2
        while unit < end:
            _units(FOUR, ONE, arguments, frame, n_rows, unit, each)
            unit += 1


@inner
def _block(arguments: int, frame: int, first: int, count: int, hidden: int, stride: int) -> None:
    """Add a block's `count` listed neurons, from index `first` of the list on, to the section's sums."""
    rows, n_units, n_tokens = word(frame + ROWS, 0) + 8 * first, word(arguments, N_UNITS), word(arguments, N_TOKENS)
    n_rows = (count + 3) & -4
    for at in range(n_rows):
        neuron = word(rows, min(at, count - 1))
        write_integer(word(arguments, DOWN + ROW_CODES) + neuron * UNIT_BYTES * n_units, frame + LINES + 8 * at)
        for token in range(n_tokens):
            h = read_float(hidden + stride * token + 4 * (first + at)) if at < count else F32
            write_float(h, frame + HIDDEN + 4 * (BLOCK * token + at))
    n_listed = word(frame + N_ROWS, 0)
    n_up = n_listed if word(arguments, UP + ROW_CODES) else 0
    write_integer(n_up + min(first + count + AHEAD, n_listed), frame + LIMIT)
    scales, end = word(arguments, DOWN + SCALE_BITS), word(arguments, DOWN + SCALES_END)
    for start in range(0, n_units, STRIP_UNITS):
        for at in range(n_rows):
            address = scales + 4 * (word(rows, min(at, count - 1)) * n_units + start)
            store16(_scales(address, end), frame + SCALES + FACTOR_BYTES * at)
        for token in range(n_tokens):
            _weigh(frame, n_rows, token)
        _strip(arguments, frame, n_rows, start)


@inner
def _clear(address: int, n_bytes: int) -> None:
    for at in range(0, n_bytes, 64):
        store16(spread(F32), address + at)


def _sections(arguments: int, index: int) -> None:
    """Compute the sums of SECTIONS_PER_CHUNK sections for every token, and record which have active neurons."""
    frame = scratch(FRAME_BYTES)
    n_neurons, size = word(arguments, N_NEURONS), word(arguments, BLOCKS_PER_SECTION) * BLOCK
    n_sections, sums_bytes = (
        word(arguments, SECTIONS_PER_CHUNK),
        word(arguments, N_TOKENS) * word(arguments, SUMS_STRIDE),
    )
    rows = word(arguments, LISTS) + index * list_bytes(n_sections * size, word(arguments, N_TOKENS))
    hidden, stride = rows + 8 * n_sections * size, 4 * n_sections * size
    before = word(arguments, FIRST_SECTION)
    first = before + index * n_sections
    count = _list(arguments, first * size, min((first + n_sections) * size, n_neurons), rows, hidden, stride)
    begin_list(frame, rows, count)
    if count and word(arguments, UP + ROW_CODES):
        _compute_hidden(arguments, frame, count, hidden, stride)
    begin = 0
    for section in range(first, min(first + n_sections, before + word(arguments, N_SECTIONS))):
        sums = word(arguments, SUMS) + (section - before) * sums_bytes
        write_integer(sums, frame + RESULT)
        is_used = begin < count and word(rows, begin) // size == section
        write_integer(is_used, word(arguments, USED) + 8 * (section - before))
        if is_used:
            _clear(sums, sums_bytes)
        while begin < count and word(rows, begin) // size == section:
            end = begin + 1
            while end < count and word(rows, end) // BLOCK == word(rows, begin) // BLOCK:
                end += 1
            _block(arguments, frame, begin, end - begin, hidden, stride)
            begin = end


SECTIONS = Chunk(_sections)
