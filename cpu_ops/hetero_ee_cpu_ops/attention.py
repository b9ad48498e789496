"""Attention of m new rows of any sequences against the KV cache.

out[r, h] = sum over p of softmax_p(q[r, h] k[p] / sqrt(d)) v[p],  p = max(0, position + 1 - window) .. position,
with k, v of the row's own sequence and of key head h // (n_heads / n_kv_heads); m rows, d = head_dim.

Online softmax (arXiv 1805.02867, 2205.14135) over blocks of 64 absolute positions, in order: a row's bits depend on its
query, its position, the window and the keys and values it sees, never on other rows, the capacity, or threads.
Within a block, key p's product is summed in 16 lanes by features and then over lanes in a fixed tree; each output
feature takes the block's values in order of position.

Layout: docs/FORMAT.md has the cache; here keys and values of one sequence are (n_layers, n_kv_heads, capacity, d)
contiguous, fp32, fp16 (as uint16 bits) or int8; int8 with fp32 scales (n_layers, n_kv_heads, capacity). Queries (m,
features) fp32, heads side by side from `first` on. Any d; 1 <= n_heads / n_kv_heads <= 128.
"""

from math import sqrt
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_ee_cpu_ops.lazy import NO_ARGUMENTS, Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.places import CAPACITY, COLUMNS, KEYS, POSITION
from hetero_ee_cpu_ops.simd import F32X16, I64, f32x16, load, splat, store_rows, zeros
from hetero_ee_cpu_ops.simd import F32 as LLVM_F32
from hetero_ee_cpu_ops.simd_float import (
    ELEMENTS,
    add,
    element_bytes,
    exponential,
    first_lane,
    fold,
    fused,
    keep_lanes,
    lane_maximum,
    lane_mask,
    lane_sum,
    load16,
    load_lanes,
    loader,
    masked_load,
    maximum,
    multiply,
    multiply_add,
    pointer,
    read_float,
    read_integer,
    scratch,
    spread,
    store16,
    store_lanes,
    subtract,
    write_float,
)
from hetero_ee_cpu_ops.team import Team

F32, MINUS_INFINITY = np.float32(0), np.float32(-np.inf)
BLOCK = 64  # positions between two rescalings: 4 registers of scores; a block's keys (fp32, d 128) fit an L1 cache
MAX_GROUP = 128  # query heads of one key head; their running maxima and sums lie on the stack
SHARED_FROM = 200_000  # positions x query features: about 10 us of one thread; below, the caller computes alone
N_ARGUMENTS = 10


@intrinsic
def add_products(typing: Any, totals: Any, query: Any, keys: Any, stride: Any, element: Any) -> Any:
    """totals[t] += 16 features of the query (fp32 at `query`) x those of key t (at keys + t * stride elements)."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        features, place, results = load(builder, arguments[1], F32X16), arguments[2], []
        step = builder.mul(arguments[3], ir.Constant(I64, element.bitwidth // 8))
        for total in cgutils.unpack_tuple(builder, arguments[0], totals.count):
            results.append(fused(context, builder, convert(load(builder, place, kind)), features, total))
            place = builder.add(place, step)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, types.intp, types.intp, types.intp, element), codegen


@intrinsic
def add_products_lanes(typing: Any, totals: Any, query: Any, keys: Any, stride: Any, count: Any, element: Any) -> Any:
    """The same for the last `count` features of a head."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        mask = lane_mask(builder, ir.Constant(I64, 0), arguments[4])
        features, place, results = masked_load(builder, arguments[1], F32X16, mask), arguments[2], []
        step = builder.mul(arguments[3], ir.Constant(I64, element.bitwidth // 8))
        for total in cgutils.unpack_tuple(builder, arguments[0], totals.count):
            key = convert(masked_load(builder, place, kind, mask))
            results.append(fused(context, builder, key, features, total))
            place = builder.add(place, step)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, types.intp, types.intp, types.intp, types.intp, element), codegen


@intrinsic
def store_sums(typing: Any, totals: Any, address: Any) -> Any:
    """The sum of each vector's lanes, side by side from `address` on; summed as by lane_sum, however many they are."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = list(cgutils.unpack_tuple(builder, arguments[0], totals.count))
        sums = fold(builder, vectors, builder.fadd)
        builder.store(sums, pointer(builder, arguments[1], sums.type)).align = 4
        return context.get_dummy_value()

    return types.void(totals, types.intp), codegen


@intrinsic
def load_scaled(typing: Any, rows: Any, address: Any, factor: Any) -> Any:
    """For each element of the tuple `rows`, the next 16 fp32 values at `address`, times factor."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factor_ = splat(builder, F32X16, arguments[2])
        values = [builder.fmul(load(builder, arguments[1], F32X16, 64 * i), factor_) for i in range(rows.count)]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(f32x16, rows.count)(rows, types.intp, types.float32), codegen


@intrinsic
def add_weighted(typing: Any, totals: Any, weight: Any, values: Any, element: Any) -> Any:
    """totals[t] += the fp32 at `weight` x values 16t..16t+15 at `values`."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        weight_ = splat(builder, F32X16, load(builder, arguments[1], LLVM_F32))
        results = []
        for number, total in enumerate(cgutils.unpack_tuple(builder, arguments[0], totals.count)):
            value = convert(load(builder, arguments[2], kind, 2 * number * element.bitwidth))
            results.append(fused(context, builder, value, weight_, total))
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, types.intp, types.intp, element), codegen


@njit(cache=True)  # type: ignore[untyped-decorator]
def _products(rows: Any, query: int, keys: int, head_dim: int, scores: int, element: Any) -> None:
    """Products of one query with len(rows) keys in a row."""
    totals = zeros(rows)
    i = 0
    while i + 16 <= head_dim:
        totals = add_products(totals, query + 4 * i, keys + i * element_bytes(element), head_dim, element)
        i += 16
    if i < head_dim:
        at = keys + i * element_bytes(element)
        totals = add_products_lanes(totals, query + 4 * i, at, head_dim, head_dim - i, element)
    store_sums(totals, scores)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _softmax(scores: int, first: int, end: int, factor: Any, key_scales: int, value_scales: int, state: int) -> Any:
    """Turns scores of lanes first..end-1 of a block into weights; returns what earlier blocks' sums are to be scaled by.

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


@njit(cache=True)  # type: ignore[untyped-decorator]
def _weigh(rows: Any, weights: int, values: int, n: int, head_dim: int, correction: Any, out: int, element: Any) -> None:
    """16 len(rows) features: out = out * correction + sum over n positions of weight x value."""
    totals = load_scaled(rows, out, correction)
    for position in range(n):
        at = values + position * head_dim * element_bytes(element)
        totals = add_weighted(totals, weights + 4 * position, at, element)
    store_rows(totals, out, 64)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _weigh_lanes(
    weights: int, values: int, n: int, head_dim: int, count: int, correction: Any, out: int, element: Any
) -> None:
    """The last `count` features of a head."""
    total = multiply(load_lanes(out, 0, count, F32), spread(correction))
    for position in range(n):
        value = load_lanes(values + position * head_dim * element_bytes(element), 0, count, element)
        total = multiply_add(value, spread(read_float(weights + 4 * position)), total)
    store_lanes(total, out, count, F32)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _weighted_values(
    weights: int, values: int, n: int, head_dim: int, correction: Any, out: int, element: Any
) -> None:
    i = 0
    while i + 64 <= head_dim:
        _weigh((0, 0, 0, 0), weights, values + i * element_bytes(element), n, head_dim, correction, out + 4 * i, element)
        i += 64
    while i + 16 <= head_dim:
        _weigh((0,), weights, values + i * element_bytes(element), n, head_dim, correction, out + 4 * i, element)
        i += 16
    if i < head_dim:
        at = values + i * element_bytes(element)
        _weigh_lanes(weights, at, n, head_dim, head_dim - i, correction, out + 4 * i, element)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _block(
    query: int, keys: int, values: int, key_scales: int, value_scales: int, first: int, end: int, head_dim: int,
    factor: Any, state: int, out: int, element: Any,
) -> None:
    """One query against positions first..end-1, counted from the block's start; keys .. value_scales: of that start."""
    scores = scratch(256)
    row = head_dim * element_bytes(element)
    i = first
    while i + 4 <= end:
        _products((0, 0, 0, 0), query, keys + i * row, head_dim, scores + 4 * i, element)
        i += 4
    while i < end:
        _products((0,), query, keys + i * row, head_dim, scores + 4 * i, element)
        i += 1
    correction = _softmax(scores, first, end, factor, key_scales, value_scales, state)
    _weighted_values(scores + 4 * first, values + first * row, end - first, head_dim, correction, out, element)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _finish(out: int, total: Any, head_dim: int) -> None:
    inverse = spread(np.float32(1.0 / total))
    for i in range(0, head_dim, 16):
        count = min(16, head_dim - i)
        store_lanes(multiply(load_lanes(out + 4 * i, 0, count, F32), inverse), out + 4 * i, count, F32)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _item(arguments: int, index: int, element: Any) -> None:
    """One row and key head, with all its query heads."""
    queries, places, out = read_integer(arguments), read_integer(arguments + 16), read_integer(arguments + 24)
    n_kv_heads, group, head_dim = (
        read_integer(arguments + 32), read_integer(arguments + 40), read_integer(arguments + 48),
    )
    window, factor = read_integer(arguments + 64), read_float(arguments + 72)
    row, head = index // n_kv_heads, index % n_kv_heads
    place = places + 8 * COLUMNS * row
    capacity, position = read_integer(place + 8 * CAPACITY), read_integer(place + 8 * POSITION)
    line = (read_integer(arguments + 56) * n_kv_heads + head) * capacity  # of position 0 of this layer and head
    row_bytes = head_dim * element_bytes(element)
    keys, values = read_integer(place + 8 * KEYS) + line * row_bytes, read_integer(place + 8 * KEYS + 8) + line * row_bytes
    key_scales, value_scales = read_integer(place + 8 * KEYS + 16), read_integer(place + 8 * KEYS + 24)
    query = queries + row * read_integer(arguments + 8) + 4 * head * group * head_dim
    target = out + 4 * (row * n_kv_heads + head) * group * head_dim
    states = scratch(1024)
    for number in range(group):
        write_float(MINUS_INFINITY, states + 8 * number)
        write_float(F32, states + 8 * number + 4)
    for i in range(group * head_dim):
        write_float(F32, target + 4 * i)
    first = max(0, position + 1 - window) if window else 0
    for start in range(first & ~(BLOCK - 1), position + 1, BLOCK):
        low, high = max(first - start, 0), min(position + 1 - start, BLOCK)
        k_scales = key_scales + 4 * (line + start) if key_scales else 0
        v_scales = value_scales + 4 * (line + start) if value_scales else 0
        for number in range(group):
            move = 4 * number * head_dim
            _block(
                query + move, keys + start * row_bytes, values + start * row_bytes, k_scales, v_scales, low, high,
                head_dim, factor, states + 8 * number, target + move, element,
            )  # fmt: skip
    for number in range(group):
        _finish(target + 4 * number * head_dim, read_float(states + 8 * number + 4), head_dim)
