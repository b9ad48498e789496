"""Inner steps of attention: some queries of one key head against a block of 64 positions.

The queries are those of consecutive rows of one sequence, all query heads of a row side by side; each query sees its
own range of positions, `first` .. `end` - 1. Products and weighted sums run in register tiles of several queries x
keys (or features). If one tile holds all queries, it converts keys and values as it loads them. For several tiles they
are first converted to fp32: 16 positions of keys (a piece) or 64 features of values at a time. Neither a tile's height
nor the other queries change the order of a sum, so a query's bits depend only on itself and on what it sees.

While a block's keys are multiplied, its values are prefetched; while its values are, the next block's keys are. They
go into the L2 cache, since they may exceed L1.

A frame is the stack memory of one work item: queries and sums padded to 16 features, the piece in fp32, scores.

Parameters that many functions here share:
    tile, rows: tuples; len(rows) is a tile's number of queries, len(tile) its number of vector registers. Only their
        lengths matter: a length is part of a Numba type, so each tile size is compiled for itself.
    frame: address of the frame.      number: index of a query in the frame.      padded: head_dim rounded up to 16.
    start: the block's first position.      first, end, low, high: ranges of positions, relative to `start` if so named.
    path, branch: address of the slots of positions from `branch` on, see kv_table.py; path 0 if slots are positions.
    keys, values: addresses of fp32 or stored rows.      stride: bytes from one position's row to the next.
    ahead: address to prefetch from meanwhile, 0 for none; its rows have the type of `stored`.
    element, stored: any value of the type that keys and values are held in (fp32 0.0, uint16 0 for fp16, int8 0).
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.simd.bytes import prefetch_far, word, zeros
from hetero_ee_cpu_ops.simd.floats import (
    element_bytes,
    load16,
    load_lanes,
    multiply,
    read_float,
    spread,
    store16,
    store_lanes,
    write_float,
    write_integer,
)
from hetero_ee_cpu_ops.simd.tuples import add_products, add_weighted, load_tile, store_sums, store_tile

F32, MINUS_INFINITY = np.float32(0), np.float32(-np.inf)
BLOCK = 64  # positions between two rescalings of the softmax: 4 registers of scores
PIECE = 16  # positions whose keys are multiplied together
WIDTH = 64  # features of a block's values that are converted together
MAX_QUERIES = 64
MAX_HEAD_DIM = 1024
# Features of an item's queries together: 147 KB with their sums, which fits an L2 cache. 32 queries of 576 features
# convert keys and values together; with 12, prompts of latent attention took 1.15 times as long (Zen 4, Nov 2026).
MAX_FEATURES = 18432
# Byte offsets in the frame. For query n: QUERIES and SUMS at 4 n padded, SCORES at 256 n, STATES (running maximum, sum)
# and RANGES (first, end) at 8 n and 16 n.
QUERIES, SUMS = 0, 4 * MAX_FEATURES
PIECES = 2 * SUMS
SCORES = PIECES + 4 * PIECE * MAX_HEAD_DIM
STATES = SCORES + 4 * BLOCK * MAX_QUERIES
RANGES = STATES + 8 * MAX_QUERIES
SCALES = RANGES + 16 * MAX_QUERIES  # of a block's keys, then of its values, if its positions are scattered
FRAME_BYTES = SCALES + 8 * BLOCK
ONE, FOUR = (0,), (0,) * 4


@inner
def begin_query(
    frame: int, number: int, query: int, head_dim: int, padded: int, first: int, end: int, sink: int
) -> None:
    """Write query `number` into the frame.

    `query` is the address of its features, or 0 for padding with zeros; `sink` that of its head's sink, or 0 for none.
    """
    at, total = frame + QUERIES + 4 * number * padded, frame + SUMS + 4 * number * padded
    for i in range(0, padded, 16):
        features = load_lanes(query + 4 * i, 0, min(16, head_dim - i), F32) if query else spread(F32)
        store16(features, at + 4 * i)
        store16(spread(F32), total + 4 * i)
    write_float(read_float(sink) if sink else MINUS_INFINITY, frame + STATES + 8 * number)
    write_float(np.float32(1) if sink else F32, frame + STATES + 8 * number + 4)
    write_integer(first, frame + RANGES + 16 * number)
    write_integer(end, frame + RANGES + 16 * number + 8)


@inner
def finish_query(frame: int, number: int, out: int, head_dim: int, padded: int) -> None:
    inverse = spread(np.float32(1.0 / read_float(frame + STATES + 8 * number + 4)))
    total = frame + SUMS + 4 * number * padded
    for i in range(0, head_dim, 16):
        store_lanes(multiply(load16(total + 4 * i, F32), inverse), out + 4 * i, min(16, head_dim - i), F32)


@inner
def _fetch(address: int, n_bytes: int) -> None:
    for offset in range(0, n_bytes, 64):
        prefetch_far(address + offset)


@inner
def slot_in_block(start: int, position: int, path: int, branch: int) -> int:
    """Return the slot of position start + `position`, relative to slot `start`."""
    return word(path, start + position - branch) - start if path and start + position >= branch else position


@inner
def gather_scales(start: int, low: int, high: int, path: int, branch: int, scales: int, target: int) -> None:
    """Copy the scales of positions start + low .. start + high - 1; `scales` is the address of that of slot `start`."""
    for position in range(low, high):
        write_float(read_float(scales + 4 * slot_in_block(start, position, path, branch)), target + 4 * position)


@inner
def _unpack(
    source: int, stride: int, start: int, low: int, n: int, path: int, branch: int, n_features: int, width: int,
    piece: int, element: Any,
) -> None:  # fmt: skip
    """Convert `width` features of n positions from start + low on to fp32, with zeros after the n_features that exist.

    `source` is the address of slot `start`.
    """
    for position in range(n):
        at = source + slot_in_block(start, low + position, path, branch) * stride
        target = piece + 4 * position * width
        if n_features >= width:
            for i in range(0, width, 16):
                store16(load16(at + i * element_bytes(element), element), target + 4 * i)
        else:
            for i in range(0, width, 16):
                value = load_lanes(at + i * element_bytes(element), 0, min(16, n_features - i), element)
                store16(value, target + 4 * i)


@inner
def _products(
    cells: Any, rows: Any, queries: int, padded: int, keys: int, stride: int, scores: int, ahead: int,
    stored: Any, element: Any,
) -> None:  # fmt: skip
    """Compute the scores of len(rows) queries with the piece's 16 keys."""
    n_keys = len(cells) // len(rows)
    step = n_keys * 16 * element_bytes(stored)
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


@inner
def _sees(frame: int, number: int, n: int, start: int, end: int) -> bool:
    """Return whether any of the n queries from `number` on sees any of the positions start..end-1."""
    for other in range(number, number + n):
        at = frame + RANGES + 16 * other
        if word(at, 0) < end and word(at, 1) > start:
            return True
    return False


@inner
def _piece_scores(
    tile: Any, rows: Any, frame: int, n_queries: int, padded: int, start: int, piece: int, keys: int, stride: int,
    ahead: int, stored: Any, element: Any,
) -> None:  # fmt: skip
    """Compute all queries' scores with one piece of keys, at positions `piece` .. `piece` + 15 of the block."""
    number = 0
    while number < n_queries:
        queries, scores = frame + QUERIES + 4 * number * padded, frame + SCORES + 4 * (BLOCK * number + piece)
        if n_queries - number == 1:
            _products(tile, ONE, queries, padded, keys, stride, scores, ahead, stored, element)
            number += 1
        else:
            if _sees(frame, number, len(rows), start + piece, start + piece + PIECE):
                _products(tile, rows, queries, padded, keys, stride, scores, ahead, stored, element)
            number += len(rows)
        ahead = 0


@inner
def block_scores(
    tile: Any, rows: Any, frame: int, n_queries: int, head_dim: int, padded: int, start: int, low: int, high: int,
    keys: int, ahead: int, path: int, branch: int, element: Any,
) -> None:  # fmt: skip
    """Compute all queries' scores with positions start + low .. start + high - 1.

    `keys` is the address of slot `start`. As many bytes as the keys have are prefetched from `ahead`.
    """
    row_bytes = head_dim * element_bytes(element)
    for piece in range(low & -PIECE, high, PIECE):
        at, n, then = keys + piece * row_bytes, min(PIECE, high - piece), ahead + piece * row_bytes if ahead else 0
        is_direct = n == PIECE and head_dim == padded and (n_queries <= len(rows) or element_bytes(element) == 4)
        if is_direct and path == 0:
            _piece_scores(tile, rows, frame, n_queries, padded, start, piece, at, row_bytes, then, element, element)
        else:
            _unpack(keys, row_bytes, start, piece, n, path, branch, head_dim, padded, frame + PIECES, element)
            _piece_scores(
                tile, rows, frame, n_queries, padded, start, piece, frame + PIECES, 4 * padded, then, element, F32
            )


@inner
def _weigh_part(
    cells: Any, rows: Any, weights: int, values: int, stride: int, n: int, sums: int, padded: int, ahead: int,
    stored: Any, element: Any,
) -> None:  # fmt: skip
    """Add n weighted positions to 16 len(cells) / len(rows) features of len(rows) sums."""
    n_bytes = len(cells) // len(rows) * 16 * element_bytes(stored)
    totals = load_tile(cells, rows, sums, 4 * padded)
    for position in range(n):
        if ahead:
            _fetch(ahead, n_bytes)
            ahead += n_bytes
        totals = add_weighted(totals, rows, weights + 4 * position, 4 * BLOCK, values + position * stride, element)
    store_tile(totals, rows, sums, 4 * padded)


@inner
def _weigh(
    tile: Any, rows: Any, weights: int, values: int, stride: int, n: int, sums: int, width: int, padded: int,
    ahead: int, stored: Any, element: Any,
) -> None:  # fmt: skip
    """Add n weighted positions to `width` features of len(rows) sums."""
    i, step = 0, 16 * (len(tile) // len(rows))
    while i + step <= width:
        at, then = values + i * element_bytes(element), ahead + BLOCK * i * element_bytes(stored) if ahead else 0
        _weigh_part(tile, rows, weights, at, stride, n, sums + 4 * i, padded, then, stored, element)
        i += step
    while i < width:
        at = values + i * element_bytes(element)
        _weigh_part(rows, rows, weights, at, stride, n, sums + 4 * i, padded, 0, stored, element)
        i += 16


@inner
def _weigh_alone(
    frame: int, number: int, first: int, end: int, values: int, stride: int, sums: int, width: int, padded: int,
    element: Any,
) -> None:  # fmt: skip
    """Add the weighted positions first..end-1 of the block to one query's sums."""
    if first < end:
        weights, at = frame + SCORES + 4 * (BLOCK * number + first), values + first * stride
        _weigh(
            FOUR, ONE, weights, at, stride, end - first, sums + 4 * number * padded, width, padded, 0, element, element
        )


@inner
def _weigh_tile(
    tile: Any, rows: Any, frame: int, number: int, start: int, values: int, stride: int, sums: int, width: int,
    padded: int, ahead: int, stored: Any, element: Any,
) -> None:  # fmt: skip
    """Add the block's weighted values to the sums of len(rows) queries, in order of position.

    Positions that all of these queries see are added together, the others query by query.
    """
    common_first, common_end = 0, BLOCK
    for other in range(number, number + len(rows)):
        at = frame + RANGES + 16 * other
        common_first, common_end = max(common_first, word(at, 0) - start), min(common_end, word(at, 1) - start)
    if common_first >= common_end:
        common_first = common_end = BLOCK
    for other in range(number, number + len(rows)):
        at = frame + RANGES + 16 * other
        first, end = max(word(at, 0) - start, 0), min(word(at, 1) - start, common_first)
        _weigh_alone(frame, other, first, end, values, stride, sums, width, padded, element)
    if common_first < common_end:
        weights, at = frame + SCORES + 4 * (BLOCK * number + common_first), values + common_first * stride
        n, at_sums = common_end - common_first, sums + 4 * number * padded
        _weigh(tile, rows, weights, at, stride, n, at_sums, width, padded, ahead, stored, element)
    for other in range(number, number + len(rows)):
        end = min(word(frame + RANGES + 16 * other, 1) - start, BLOCK)
        _weigh_alone(frame, other, common_end, end, values, stride, sums, width, padded, element)


@inner
def _weigh_all(
    tile: Any, rows: Any, frame: int, n_queries: int, start: int, values: int, stride: int, sums: int, width: int,
    padded: int, ahead: int, stored: Any, element: Any,
) -> None:  # fmt: skip
    """Add the block's weighted values to all queries' sums. `values` and `sums` are addresses of the first feature."""
    number = 0
    while number < n_queries:
        if n_queries - number == 1:
            place = frame + RANGES + 16 * number
            first, end = max(word(place, 0) - start, 0), min(word(place, 1) - start, BLOCK)
            _weigh_alone(frame, number, first, end, values, stride, sums, width, padded, element)
            number += 1
        else:
            if _sees(frame, number, len(rows), start, start + BLOCK):
                _weigh_tile(
                    tile, rows, frame, number, start, values, stride, sums, width, padded, ahead, stored, element
                )
            number += len(rows)
        ahead = 0


@inner
def block_values(
    tile: Any, rows: Any, frame: int, n_queries: int, value_dim: int, row_bytes: int, padded: int, start: int, low: int,
    high: int, values: int, ahead: int, path: int, branch: int, element: Any,
) -> None:  # fmt: skip
    """Add weight x value of positions start + low .. start + high - 1 to all queries' sums.

    `values` is the address of the first of value_dim features in slot `start`.
    """
    if n_queries == 1 and value_dim % 16 == 0 and path == 0:
        at, weights = values + low * row_bytes, frame + SCORES + 4 * low
        _weigh(FOUR, ONE, weights, at, row_bytes, high - low, frame + SUMS, value_dim, padded, ahead, element, element)
    elif n_queries <= len(rows) and value_dim % 16 == 0 and path == 0:
        _weigh_all(
            tile, rows, frame, n_queries, start, values, row_bytes, frame + SUMS, value_dim, padded, ahead, element,
            element,
        )  # fmt: skip
    else:
        for i in range(0, value_dim, WIDTH):
            width, at = min(WIDTH, -(-(value_dim - i) // 16) * 16), values + i * element_bytes(element)
            target = frame + PIECES + 4 * low * width
            _unpack(at, row_bytes, start, low, high - low, path, branch, value_dim - i, width, target, element)
            then, sums = ahead + BLOCK * i * element_bytes(element) if ahead else 0, frame + SUMS + 4 * i
            _weigh_all(
                tile, rows, frame, n_queries, start, frame + PIECES, 4 * width, sums, width, padded, then,
                element, F32,
            )  # fmt: skip
