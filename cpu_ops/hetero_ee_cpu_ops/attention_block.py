"""Some queries of one key head against a block of 64 positions: the inner steps of attention.

The queries are those of consecutive rows of one sequence, all query heads of a row side by side; each sees positions
`first` .. `end` - 1 of its own. Keys and values pass 16 positions (a piece) at a time and are read and converted once
for all queries: products and weighted sums are taken in register tiles of several queries x keys or features. Neither
a tile's height nor its neighbours touch the order of a sum, so a query's bits depend on itself and on what it sees.

A frame is memory on the stack of one item: queries and sums padded to 16 features, the piece in fp32, scores.
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.kernel_files import compiled
from hetero_ee_cpu_ops.simd.bytes import prefetch, word, zeros
from hetero_ee_cpu_ops.simd.floats import (
    add,
    element_bytes,
    exponential,
    first_lane,
    keep_lanes,
    lane_maximum,
    lane_sum,
    load16,
    load_lanes,
    maximum,
    multiply,
    read_float,
    spread,
    store16,
    store_lanes,
    subtract,
    write_float,
    write_integer,
)
from hetero_ee_cpu_ops.simd.tuples import add_products, add_weighted, load_tile, store_sums, store_tile

F32, MINUS_INFINITY = np.float32(0), np.float32(-np.inf)
BLOCK = 64  # positions between two rescalings: 4 registers of scores
PIECE = 16
MAX_QUERIES = 64
MAX_HEAD_DIM = 1024
MAX_FEATURES = 8192  # of all queries of an item together: with their sums 64 KB, which an L2 cache holds
AHEAD_BYTES = 4096  # that keys and values are asked for before they are used
# The frame. Of a query number n: QUERIES and SUMS at 4 n padded, SCORES at 256 n, STATES (maximum, sum) and RANGES
# (first, end) at 8 n and 16 n.
QUERIES, SUMS = 0, 4 * MAX_FEATURES
PIECES = 2 * SUMS
SCORES = PIECES + 4 * PIECE * MAX_HEAD_DIM
STATES = SCORES + 4 * BLOCK * MAX_QUERIES
RANGES = STATES + 8 * MAX_QUERIES
FRAME_BYTES = RANGES + 16 * MAX_QUERIES
ONE, FOUR, SIXTEEN = (0,), (0,) * 4, (0,) * 16


@compiled
def begin_query(frame: int, number: int, query: int, head_dim: int, padded: int, first: int, end: int) -> None:
    """Query `number` of an item; query: the address of its features, 0 for none, which fills a tile."""
    at, total = frame + QUERIES + 4 * number * padded, frame + SUMS + 4 * number * padded
    for i in range(0, padded, 16):
        features = load_lanes(query + 4 * i, 0, min(16, head_dim - i), F32) if query else spread(F32)
        store16(features, at + 4 * i)
        store16(spread(F32), total + 4 * i)
    write_float(MINUS_INFINITY, frame + STATES + 8 * number)
    write_float(F32, frame + STATES + 8 * number + 4)
    write_integer(first, frame + RANGES + 16 * number)
    write_integer(end, frame + RANGES + 16 * number + 8)


@compiled
def finish_query(frame: int, number: int, out: int, head_dim: int, padded: int) -> None:
    inverse = spread(np.float32(1.0 / read_float(frame + STATES + 8 * number + 4)))
    total = frame + SUMS + 4 * number * padded
    for i in range(0, head_dim, 16):
        store_lanes(multiply(load16(total + 4 * i, F32), inverse), out + 4 * i, min(16, head_dim - i), F32)


@compiled
def _fetch(address: int, n_bytes: int) -> None:
    for offset in range(0, n_bytes, 64):
        prefetch(address + offset)


@compiled
def _unpack(source: int, n: int, head_dim: int, padded: int, piece: int, element: Any) -> None:
    """n positions in fp32, padded with zeros; the piece's others become zero."""
    if head_dim == padded:
        for i in range(0, n * head_dim, 16):
            store16(load16(source + i * element_bytes(element), element), piece + 4 * i)
    else:
        for position in range(n):
            for i in range(0, padded, 16):
                at = source + (position * head_dim + i) * element_bytes(element)
                value = load_lanes(at, 0, min(16, head_dim - i), element)
                store16(value, piece + 4 * (position * padded + i))
    for i in range(n * padded, PIECE * padded, 16):
        store16(spread(F32), piece + 4 * i)


@compiled
def _products(
    cells: Any, rows: Any, queries: int, padded: int, keys: int, stride: int, scores: int, ahead: int, element: Any
) -> None:
    """Scores of len(rows) queries with the piece's 16 keys; ahead: what to ask for meanwhile, 0 for nothing."""
    n_keys = len(cells) // len(rows)
    step = n_keys * 16 * element_bytes(element)
    for key in range(0, PIECE, n_keys):
        totals = zeros(cells)
        at = keys + key * stride
        for i in range(0, padded, 16):
            if ahead:
                _fetch(ahead, step)
                ahead += step
            totals = add_products(
                totals, rows, queries + 4 * i, 4 * padded, at + i * element_bytes(element), stride, element
            )
        store_sums(totals, rows, scores + 4 * key, 4 * BLOCK)


@compiled
def _sees(frame: int, number: int, n: int, start: int, end: int) -> bool:
    """Whether any of these n queries sees any of positions start..end-1."""
    for other in range(number, number + n):
        at = frame + RANGES + 16 * other
        if word(at, 0) < end and word(at, 1) > start:
            return True
    return False


@compiled
def _piece_scores(
    tile: Any, rows: Any, frame: int, n_queries: int, padded: int, start: int, piece: int, keys: int, stride: int,
    ahead: int, element: Any,
) -> None:  # fmt: skip
    """start: the block's first position; piece: of the piece within it."""
    number = 0
    while number < n_queries:
        queries, scores = frame + QUERIES + 4 * number * padded, frame + SCORES + 4 * (BLOCK * number + piece)
        if n_queries - number == 1:
            _products(SIXTEEN, ONE, queries, padded, keys, stride, scores, ahead, element)
            number += 1
        else:
            if _sees(frame, number, len(rows), start + piece, start + piece + PIECE):
                _products(tile, rows, queries, padded, keys, stride, scores, ahead, element)
            number += len(rows)
        ahead = 0


@compiled
def block_scores(
    tile: Any, rows: Any, frame: int, n_queries: int, head_dim: int, padded: int, start: int, low: int, high: int,
    keys: int, element: Any,
) -> None:  # fmt: skip
    """Products of all queries with positions start + low .. start + high - 1; keys: of position `start`."""
    row_bytes = head_dim * element_bytes(element)
    for piece in range(low & -PIECE, high, PIECE):
        at, n = keys + piece * row_bytes, min(PIECE, high - piece)
        if n == PIECE and head_dim == padded and (n_queries == 1 or element_bytes(element) == 4):
            _piece_scores(
                tile, rows, frame, n_queries, padded, start, piece, at, row_bytes, at + AHEAD_BYTES, element
            )
        else:
            _unpack(at, n, head_dim, padded, frame + PIECES, element)
            _piece_scores(
                tile, rows, frame, n_queries, padded, start, piece, frame + PIECES, 4 * padded, at + AHEAD_BYTES, F32
            )


@compiled
def _softmax(scores: int, first: int, end: int, factor: Any, key_scales: int, value_scales: int, state: int) -> Any:
    """Turns scores of lanes first..end-1 of a block into weights; returns the factor for earlier blocks' sums.

    state: running maximum and sum. Scales: addresses for the block's first lane, or 0. Lanes outside are not used.
    """
    best = spread(MINUS_INFINITY)
    for lane in range(first & ~15, end, 16):
        low, high, at = max(first - lane, 0), min(end - lane, 16), scores + 4 * lane
        score = multiply(load16(at, F32), spread(factor))
        if key_scales:
            score = multiply(score, load_lanes(key_scales + 4 * lane, low, high, F32))
        score = keep_lanes(score, low, high, MINUS_INFINITY)
        store16(score, at)
        best = maximum(best, score)
    before = read_float(state)
    highest = max(before, lane_maximum(best))
    total = spread(F32)
    for lane in range(first & ~15, end, 16):
        at = scores + 4 * lane
        weight = exponential(subtract(load16(at, F32), spread(highest)))
        total = add(total, weight)
        if value_scales:
            low, high = max(first - lane, 0), min(end - lane, 16)
            weight = multiply(weight, load_lanes(value_scales + 4 * lane, low, high, F32))
        store16(weight, at)
    correction = first_lane(exponential(spread(np.float32(before - highest))))
    write_float(highest, state)
    write_float(np.float32(read_float(state + 4) * correction + lane_sum(total)), state + 4)
    return correction


@compiled
def block_weights(
    frame: int, n_queries: int, padded: int, start: int, factor: Any, key_scales: int, value_scales: int
) -> None:
    """Scores become weights, and the sums of earlier blocks are corrected. Scales: of position `start`, or 0."""
    for number in range(n_queries):
        at = frame + RANGES + 16 * number
        first, end = max(word(at, 0) - start, 0), min(word(at, 1) - start, BLOCK)
        if first < end:
            scores, state = frame + SCORES + 4 * BLOCK * number, frame + STATES + 8 * number
            correction = _softmax(scores, first, end, factor, key_scales, value_scales, state)
            total = frame + SUMS + 4 * number * padded
            for i in range(0, padded, 16):
                store16(multiply(load16(total + 4 * i, F32), spread(correction)), total + 4 * i)


@compiled
def _weigh_part(
    cells: Any, rows: Any, weights: int, values: int, stride: int, n: int, sums: int, padded: int, ahead: int,
    row_bytes: int, element: Any,
) -> None:  # fmt: skip
    """Adds n positions to some features of len(rows) sums."""
    n_bytes = len(cells) // len(rows) * 16 * element_bytes(element)
    totals = load_tile(cells, rows, sums, 4 * padded)
    for position in range(n):
        if ahead:
            _fetch(ahead, n_bytes)
            ahead += row_bytes
        totals = add_weighted(totals, rows, weights + 4 * position, 4 * BLOCK, values + position * stride, element)
    store_tile(totals, rows, sums, 4 * padded)


@compiled
def _weigh(
    tile: Any, rows: Any, frame: int, number: int, first: int, end: int, padded: int, values: int, stride: int,
    ahead: int, row_bytes: int, element: Any,
) -> None:  # fmt: skip
    """Adds positions first..end-1 of a block to the sums of queries `number` on; values: of the block's start."""
    weights, at = frame + SCORES + 4 * (BLOCK * number + first), values + first * stride
    sums, n_vectors, i = frame + SUMS + 4 * number * padded, len(tile) // len(rows), 0
    while i + 16 * n_vectors <= padded:
        _weigh_part(
            tile, rows, weights, at + i * element_bytes(element), stride, end - first, sums + 4 * i, padded,
            ahead + i * element_bytes(element) if ahead else 0, row_bytes, element,
        )  # fmt: skip
        i += 16 * n_vectors
    while i < padded:
        _weigh_part(
            rows, rows, weights, at + i * element_bytes(element), stride, end - first, sums + 4 * i, padded,
            ahead + i * element_bytes(element) if ahead else 0, row_bytes, element,
        )  # fmt: skip
        i += 16


@compiled
def _weigh_alone(frame: int, number: int, first: int, end: int, padded: int, values: int, ahead: int) -> None:
    """One query of a tile, where the others don't see what it sees."""
    if first < end:
        _weigh(FOUR, ONE, frame, number, first, end, padded, values, 4 * padded, ahead, 4 * padded, F32)


@compiled
def _weigh_tile(
    tile: Any, rows: Any, frame: int, number: int, start: int, low: int, high: int, padded: int, values: int,
    ahead: int, row_bytes: int,
) -> None:  # fmt: skip
    """The queries of a tile: positions low..high-1 of the block, as far as each sees them, in order."""
    common_first, common_end = low, high
    for other in range(number, number + len(rows)):
        at = frame + RANGES + 16 * other
        common_first, common_end = max(common_first, word(at, 0) - start), min(common_end, word(at, 1) - start)
    if common_first >= common_end:
        common_first = common_end = high
    for other in range(number, number + len(rows)):
        at = frame + RANGES + 16 * other
        first, end = max(word(at, 0) - start, low), min(word(at, 1) - start, high)
        _weigh_alone(frame, other, first, min(end, common_first), padded, values, 0)
    if common_first < common_end:
        _weigh(
            tile, rows, frame, number, common_first, common_end, padded, values, 4 * padded, ahead, row_bytes, F32
        )
    for other in range(number, number + len(rows)):
        end = min(word(frame + RANGES + 16 * other, 1) - start, high)
        _weigh_alone(frame, other, common_end, end, padded, values, 0)


@compiled
def block_values(
    tile: Any, rows: Any, frame: int, n_queries: int, head_dim: int, padded: int, start: int, low: int, high: int,
    values: int, element: Any,
) -> None:  # fmt: skip
    """Adds weight x value of positions start + low .. start + high - 1; values: of position `start`."""
    row_bytes = head_dim * element_bytes(element)
    if n_queries == 1 and head_dim == padded:
        ahead = values + low * row_bytes + AHEAD_BYTES
        _weigh(FOUR, ONE, frame, 0, low, high, padded, values, row_bytes, ahead, row_bytes, element)
        return
    for piece in range(low & -PIECE, high, PIECE):
        at, n, first, end = values + piece * row_bytes, min(PIECE, high - piece), max(piece, low), piece + PIECE
        _unpack(at, n, head_dim, padded, frame + PIECES, element)
        source, ahead, number = frame + PIECES - 4 * piece * padded, at + AHEAD_BYTES, 0
        while number < n_queries:
            if n_queries - number == 1:
                place = frame + RANGES + 16 * number
                first, end = max(word(place, 0) - start, first), min(word(place, 1) - start, end)
                _weigh_alone(frame, number, first, end, padded, source, ahead)
                number += 1
            else:
                if _sees(frame, number, len(rows), start + piece, start + piece + PIECE):
                    _weigh_tile(
                        tile, rows, frame, number, start, piece, min(piece + PIECE, high), padded, source, ahead,
                        row_bytes,
                    )  # fmt: skip
                number += len(rows)
            ahead = 0
