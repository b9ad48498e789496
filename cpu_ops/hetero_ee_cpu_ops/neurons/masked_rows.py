"""One thread's share of masked_linear.py: lists the wanted neurons of a range, then multiplies them 16 at a time.

For few tokens, rows are multiplied as they are unpacked. For many tokens, parts of 16 rows ("strips") are unpacked once
into a frame that fits the L1 cache, and multiplied by 8 tokens at a time.
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.matmul import MAX_PASS_ROWS
from hetero_ee_cpu_ops.neurons.listed_rows import (
    FACTOR,
    FIRST,
    FIRST_TOKEN,
    LINES,
    LISTS,
    N_NEURONS,
    N_TOKENS,
    N_UNITS,
    OFFSET_BYTES,
    OTHERS,
    SCALE_LINES,
    SCALES,
    STRIP_GROUPS,
    STRIP_UNITS,
    TABLE,
    TILE,
    begin_list,
    inputs,
    load_prefix,
    multiply_rows,
    prefetch_first_tile,
    prefetch_rows,
    select_rows,
)
from hetero_ee_cpu_ops.neurons.row_unit import UNPACKED_UNIT_BYTES, add_unpacked_unit, unpack_scales, unpack_unit
from hetero_ee_cpu_ops.neurons.rows import UNIT_BYTES
from hetero_ee_cpu_ops.quantize import GROUP
from hetero_ee_cpu_ops.simd.bytes import lowest_bit, nonzero_lanes, store_rows, word, zeros
from hetero_ee_cpu_ops.simd.floats import (
    add,
    load16,
    multiply,
    operation,
    read_float,
    scratch,
    spread,
    store16,
    store_lanes,
    write_float,
    write_integer,
)
from hetero_ee_cpu_ops.simd.tuples import load_tile, store_tile

ONE, TWO, FOUR, EIGHT = (0,), (0,) * 2, (0,) * 4, (0,) * 8
MANY = 16  # tokens from which on rows are unpacked first
F32, F32_ONE = np.float32(0), np.float32(1)
# Byte offsets in a chunk's frame and indices in the argument array, after listed_rows.py's.
UNPACKED = SCALES + 64 * STRIP_GROUPS  # a strip of 16 rows
SUMS = UNPACKED + STRIP_UNITS * UNPACKED_UNIT_BYTES  # 16 fp32 per token
FRAME_BYTES = SUMS + 64 * MAX_PASS_ROWS
SCORES, SKIPS, BIAS, OUTPUT, NEURONS_PER_CHUNK, READS_ALL = range(OTHERS, OTHERS + 6)
N_ARGUMENTS = OTHERS + 6

where_positive = operation(2, lambda a, b: b.where(">", 0.0, a, 0.0), "where_positive", "a where b > 0, else 0.")


@inner
def _store(value: Any, address: int, count: int) -> None:
    if count >= 16:
        store16(value, address)
    else:
        store_lanes(value, address, count, F32)


@inner
def _list(arguments: int, first: int, end: int, rows: int) -> int:
    """List the neurons of first .. end - 1 that any token wants, repeating the last one to fill a tile of 16.

    Returns:
        The number of neurons, not counting the repetitions.
    """
    n_neurons, n_tokens, count = word(arguments, N_NEURONS), word(arguments, N_TOKENS), 0
    scores = word(arguments, SCORES) + 4 * n_neurons * word(arguments, FIRST_TOKEN)
    for start in range(first, end, 16):
        if word(arguments, READS_ALL):
            bits = (1 << min(end - start, 16)) - 1
        else:
            bits = 0
            for token in range(n_tokens):
                found = load_prefix(scores + 4 * (token * n_neurons + start), end - start)
                bits |= nonzero_lanes(where_positive(spread(F32_ONE), found))
        while bits:
            write_integer(start + lowest_bit(bits), rows + 8 * count)
            bits &= bits - 1
            count += 1
    for at in range(count, (count + TILE - 1) & -TILE):
        write_integer(word(rows, count - 1), rows + 8 * at)
    return count


@inner
def _clear(arguments: int, first: int, end: int) -> None:
    """Set the outputs of neurons first .. end - 1 to 0 for every token."""
    n_neurons = word(arguments, N_NEURONS)
    out = word(arguments, OUTPUT) + 4 * n_neurons * word(arguments, FIRST_TOKEN)
    for token in range(word(arguments, N_TOKENS)):
        for neuron in range(first, end, 16):
            _store(spread(F32), out + 4 * (token * n_neurons + neuron), end - neuron)


@inner
def _add_strip(arguments: int, frame: int, token: int, start: int, n: int) -> None:
    """Add the products with n unpacked units, from unit `start` on, to the sums of 8 tokens from `token` on."""
    x, scale, offset, r = inputs(arguments, token, start)
    sums, offset_bytes = frame + SUMS + 64 * token, word(arguments, OFFSET_BYTES)
    totals = load_tile(EIGHT, EIGHT, sums, 64) if start else zeros(EIGHT)
    for unit in range(n):
        operands, scales = frame + UNPACKED + UNPACKED_UNIT_BYTES * unit, frame + SCALES + 2 * 64 * unit
        totals = add_unpacked_unit(totals, operands, scales, x, scale, offset, r)
        x += 2 * GROUP * r
        scale += 8 * r
        offset += 2 * offset_bytes * r
    store_tile(totals, EIGHT, sums, 64)


@inner
def _unpacked_products(arguments: int, frame: int, n_tokens: int) -> None:
    """Multiply the 16 selected rows by the first n_tokens tokens, a multiple of 8, strip by strip."""
    n_units, table = word(arguments, N_UNITS), word(arguments, FIRST + TABLE)
    for start in range(0, n_units, STRIP_UNITS):
        n = min(STRIP_UNITS, n_units - start)
        unpack_scales(frame + SCALE_LINES, 4 * start, n, frame + SCALES)
        for unit in range(n):
            prefetch_rows(arguments, frame, 3)
            at = frame + UNPACKED + UNPACKED_UNIT_BYTES * unit
            unpack_unit(frame + LINES, UNIT_BYTES * (start + unit), table, at)
        for token in range(0, n_tokens, 8):
            _add_strip(arguments, frame, token, start, n)
    factor = spread(read_float(arguments + 8 * (FIRST + FACTOR)))
    for at in range(frame + SUMS, frame + SUMS + 64 * n_tokens, 64):
        store16(multiply(load16(at, F32), factor), at)


@inner
def _products(arguments: int, frame: int) -> None:
    """Multiply the 16 selected rows by all tokens of the pass; store the sums in the frame at SUMS."""
    n_tokens, token, factor = word(arguments, N_TOKENS), 0, read_float(arguments + 8 * (FIRST + FACTOR))
    sums = frame + SUMS
    if n_tokens >= MANY:
        token = n_tokens & -8
        _unpacked_products(arguments, frame, token)
    while n_tokens - token >= 8:
        store_rows(multiply_rows(EIGHT, arguments, frame, token), factor, sums + 64 * token, 64)
        token += 8
    if n_tokens - token >= 4:
        store_rows(multiply_rows(FOUR, arguments, frame, token), factor, sums + 64 * token, 64)
        token += 4
    if n_tokens - token >= 2:
        store_rows(multiply_rows(TWO, arguments, frame, token), factor, sums + 64 * token, 64)
        token += 2
    if n_tokens - token >= 1:
        store_rows(multiply_rows(ONE, arguments, frame, token), factor, sums + 64 * token, 64)


@inner
def _scatter(arguments: int, frame: int, rows: int, count: int) -> None:
    """Copy the sums of `count` listed neurons, at most 16, to the outputs of the tokens that want them."""
    n_neurons, first, neuron = word(arguments, N_NEURONS), word(arguments, FIRST_TOKEN), word(rows, 0)
    bias, adjacent = word(arguments, BIAS), word(rows, count - 1) - neuron == count - 1
    for token in range(word(arguments, N_TOKENS)):
        begin, sums = 4 * n_neurons * (first + token), frame + SUMS + 64 * token
        scores, out = word(arguments, SCORES) + begin, word(arguments, OUTPUT) + begin
        if adjacent:
            value = load16(sums, F32)
            if bias:
                value = add(value, load_prefix(bias + 4 * neuron, count))
            if word(word(arguments, SKIPS), first + token):
                value = where_positive(value, load_prefix(scores + 4 * neuron, count))
            _store(value, out + 4 * neuron, count)
            continue
        for lane in range(count):  # rows are missing, so every token of the pass may skip
            at = 4 * word(rows, lane)
            if read_float(scores + at) > F32:
                product = read_float(sums + 4 * lane)
                write_float(product + read_float(bias + at) if bias else product, out + at)


def _neurons(arguments: int, index: int) -> None:
    """Compute a chunk of NEURONS_PER_CHUNK neurons for every token of the pass."""
    frame = scratch(FRAME_BYTES)
    first = index * word(arguments, NEURONS_PER_CHUNK)
    end = min(first + word(arguments, NEURONS_PER_CHUNK), word(arguments, N_NEURONS))
    rows = word(arguments, LISTS) + 8 * first
    count = _list(arguments, first, end, rows)
    if count < end - first:
        _clear(arguments, first, end)
    begin_list(frame, rows, count)
    prefetch_first_tile(arguments, frame)
    for at in range(0, count, TILE):
        select_rows(arguments, frame, at, count)
        _products(arguments, frame)
        _scatter(arguments, frame, rows + 8 * at, min(count - at, TILE))


NEURONS = Chunk(_neurons)
