"""Softmax of a block's scores, online over the blocks of attention_block.py.

Addresses and parameters are those of attention_block.py. A query's state is its running maximum and sum.
"""

from typing import Any

import numpy as np

from hetero_ee_cpu_ops.activate import soft_cap
from hetero_ee_cpu_ops.attention.attention_block import (
    BLOCK,
    F32,
    MINUS_INFINITY,
    RANGES,
    SCORES,
    STATES,
    SUMS,
)
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.simd.bytes import word
from hetero_ee_cpu_ops.simd.floats import (
    add,
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
    subtract,
    write_float,
)


@inner
def _correct(before: Any, highest: Any) -> Any:
    """Return the factor that corrects the sums of earlier blocks; exactly 1 if the maximum did not change."""
    return np.float32(1) if before == highest else first_lane(exponential(spread(np.float32(before - highest))))


@inner
def _softmax_whole(scores: int, factor: Any, key_scales: int, value_scales: int, state: int) -> Any:
    """Compute the weights of a query that sees a whole block, in registers; otherwise like _softmax."""
    a, b = multiply(load16(scores, F32), spread(factor)), multiply(load16(scores + 64, F32), spread(factor))
    c, d = multiply(load16(scores + 128, F32), spread(factor)), multiply(load16(scores + 192, F32), spread(factor))
    if key_scales:
        a, b = multiply(a, load16(key_scales, F32)), multiply(b, load16(key_scales + 64, F32))
        c, d = multiply(c, load16(key_scales + 128, F32)), multiply(d, load16(key_scales + 192, F32))
    before = read_float(state)
    highest = max(before, lane_maximum(maximum(maximum(a, b), maximum(c, d))))
    top = spread(highest)
    a, b, c, d = (
        exponential(subtract(a, top)),
        exponential(subtract(b, top)),
        exponential(subtract(c, top)),
        exponential(subtract(d, top)),
    )
    total = lane_sum(add(add(add(a, b), c), d))
    if value_scales:
        a, b = multiply(a, load16(value_scales, F32)), multiply(b, load16(value_scales + 64, F32))
        c, d = multiply(c, load16(value_scales + 128, F32)), multiply(d, load16(value_scales + 192, F32))
    store16(a, scores)
    store16(b, scores + 64)
    store16(c, scores + 128)
    store16(d, scores + 192)
    correction = _correct(before, highest)
    write_float(highest, state)
    write_float(np.float32(read_float(state + 4) * correction + total), state + 4)
    return correction


@inner
def _softmax(scores: int, first: int, end: int, factor: Any, key_scales: int, value_scales: int, state: int) -> Any:
    """Turn the scores in lanes first..end-1 of a block into weights; return the factor for earlier blocks' sums.

    `state` is the address of the running maximum and sum. Scales are addresses for the block's first lane, or 0 if the
    cache has none. Other lanes are not used.
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
    correction = _correct(before, highest)
    write_float(highest, state)
    write_float(np.float32(read_float(state + 4) * correction + lane_sum(total)), state + 4)
    return correction


@inner
def _cap(scores: int, first: int, end: int, factor: Any, cap: Any, key_scales: int) -> None:
    """Multiply the scores in lanes first..end-1 of a block by their factors and limit them to +-cap."""
    for lane in range(first & ~15, end, 16):
        low, high, at = max(first - lane, 0), min(end - lane, 16), scores + 4 * lane
        score = multiply(load16(at, F32), spread(factor))
        if key_scales:
            score = multiply(score, load_lanes(key_scales + 4 * lane, low, high, F32))
        store16(soft_cap(score, spread(cap)), at)


@inner
def block_weights(
    frame: int, n_queries: int, padded: int, start: int, factor: Any, cap: Any, key_scales: int, value_scales: int
) -> None:
    """Turn all queries' scores into weights and correct the sums of earlier blocks.

    Scales are addresses for position `start`, or 0 if the cache has none. A cap of 0 means none.
    """
    if cap > 0:
        for number in range(n_queries):
            at = frame + RANGES + 16 * number
            first, end = max(word(at, 0) - start, 0), min(word(at, 1) - start, BLOCK)
            _cap(frame + SCORES + 4 * BLOCK * number, first, end, factor, cap, key_scales)
        factor, key_scales = np.float32(1), 0
    for number in range(n_queries):
        at = frame + RANGES + 16 * number
        first, end = max(word(at, 0) - start, 0), min(word(at, 1) - start, BLOCK)
        if first < end:
            scores, state = frame + SCORES + 4 * BLOCK * number, frame + STATES + 8 * number
            if end - first == BLOCK:
                correction = _softmax_whole(scores, factor, key_scales, value_scales, state)
            else:
                correction = _softmax(scores, first, end, factor, key_scales, value_scales, state)
            if correction != 1:
                total = frame + SUMS + 4 * number * padded
                for i in range(0, padded, 16):
                    store16(multiply(load16(total + 4 * i, F32), spread(correction)), total + 4 * i)
