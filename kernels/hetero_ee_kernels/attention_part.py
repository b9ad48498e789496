"""Attention of some queries over one part of a sequence, 256 positions, and how parts are combined.

Every function returns (best, total, sums): the greatest score of each query, the sum of its weights exp(score - best),
and the sums of weight x value.

Common arguments: query, fp32 (queries, features), scaled; rest, the first features of queries whose keys are longer
than values, which are then the keys' last features, or None; first and position, int32 (queries,), which positions each
one sees; low and high, the positions to read; codes_ptr and scales_ptr, the head's keys in page 0; pages, the
sequence's row of the page table; path_ptr, the only row's path in a draft tree (see pages.py), else None; PAGE_VECTORS
and VALUES, vectors from a page to the next and from keys to values.
"""

from typing import Any

import triton
import triton.language as tl

from hetero_ee_kernels.activate import activated
from hetero_ee_kernels.tile_group import nothing, split4

RANGE, SMALLEST = tl.constexpr(1024.0), tl.constexpr(1e-30)  # magnitudes are scaled to RANGE to fit fp16's


@triton.jit
def dot_fours(x: tl.tensor, y: tl.tensor) -> Any:
    """Return sums of 4 products each, three of them fused: (A, 1, 4 n) x (1, B, 4 n) -> (A, B, n)."""
    x0, x1, x2, x3 = split4(tl.reshape(x, (x.shape[0], 1, x.shape[2] // 4, 4)))
    y0, y1, y2, y3 = split4(tl.reshape(y, (1, y.shape[1], y.shape[2] // 4, 4)))
    return tl.fma(x3, y3, tl.fma(x2, y2, tl.fma(x1, y1, x0 * y0)))


@triton.jit
def add_product(sums: tl.tensor, x: tl.tensor, y: tl.tensor) -> Any:
    """Return sums + x y for fp32 x (queries, n) of magnitudes up to RANGE, and fp16 y (n, columns)."""
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return tl.dot(high, y, tl.dot(low, y, sums))


@triton.jit
def finite_base(best: tl.tensor) -> Any:
    """Return what scores are reduced by: the greatest one, or 0 for a query that has seen nothing yet."""
    return tl.where(best == float("-inf"), 0.0, best)


@triton.jit
def add_part(best: tl.tensor, total: tl.tensor, sums: tl.tensor, part: tl.tensor) -> Any:
    """Combine one part with the running maximum (queries,), sum of weights (queries,) and sums (queries, features)."""
    higher = tl.maximum(best, part[0])
    base = finite_base(higher)
    correction, share = tl.exp(best - base), tl.exp(part[0] - base)
    total = tl.fma(part[1], share, total * correction)
    return higher, total, tl.fma(part[2], share[:, None], sums * correction[:, None])


@triton.jit
def line_on_path(path_ptr: tl.tensor, position: tl.tensor, is_read: tl.tensor) -> Any:
    """Return the lines of positions of a row in a draft tree. Those that are not read may be anything."""
    branch = tl.load(path_ptr)
    is_listed = is_read & (position >= branch)
    return tl.where(is_listed, tl.load(path_ptr + 1 + position - branch, mask=is_listed, other=0), position)


@triton.jit
def vector_on_path(
    path_ptr: tl.tensor, pages: tl.tensor, position: tl.tensor, is_read: tl.tensor, PAGE_VECTORS: tl.constexpr,
    PAGE: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the vector of each position of a row in a draft tree, int64; 0 for positions that are not read."""
    line = tl.where(is_read, line_on_path(path_ptr, position, is_read), 0)
    page = tl.load(pages + line // PAGE, mask=is_read, other=0).to(tl.int64)
    return page * PAGE_VECTORS + line % PAGE


@triton.jit
def part_of_products(
    query: tl.tensor, rest: tl.tensor, first: tl.tensor, position: tl.tensor, low: tl.tensor, high: tl.tensor,
    all_from: tl.tensor, all_until: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, pages: tl.tensor,
    path_ptr: tl.tensor, cap: tl.tensor, PAGE_VECTORS: tl.constexpr, VALUES: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, STEP: tl.constexpr, IS_CAPPED: tl.constexpr, PAGE: tl.constexpr,
) -> Any:  # fmt: skip
    """Use matrix products of fp16, whose rows are the queries. All rows see positions all_from .. all_until."""
    N: tl.constexpr = query.shape[0]
    REST: tl.constexpr = HEAD_DIM - VALUE_DIM
    place, feature = tl.arange(0, STEP), tl.arange(0, query.shape[1])[None, :]
    size = tl.maximum(tl.max(tl.abs(query), 1), SMALLEST)
    if REST > 0:
        size = tl.maximum(size, tl.max(tl.abs(rest), 1))
        rest, other = rest / size[:, None] * RANGE, tl.arange(0, rest.shape[1])[None, :]
    query, size = query / size[:, None] * RANGE, size / RANGE
    best, total = tl.full((N,), float("-inf"), tl.float32), tl.zeros((N,), tl.float32)
    sums = tl.zeros((N, query.shape[1]), tl.float32)
    for step in range(low // STEP, (high + STEP - 1) // STEP):
        at = step * STEP + place
        is_read = (at >= low) & (at < high)
        mask = is_read[:, None] & (feature < VALUE_DIM)
        if path_ptr is None:
            vector, line = tl.load(pages + step * STEP // PAGE).to(tl.int64) * PAGE_VECTORS + step * STEP % PAGE, place
            codes, key_at = codes_ptr + vector * HEAD_DIM, place[:, None] * HEAD_DIM
        else:
            vector, line = vector_on_path(path_ptr, pages, at, is_read, PAGE_VECTORS, PAGE), place * 0
            codes, key_at = codes_ptr, vector[:, None] * HEAD_DIM
        key = tl.load(codes + key_at + (REST + feature), mask=mask, other=0.0).to(tl.float16)
        score = add_product(tl.zeros((N, STEP), tl.float32), query, tl.trans(key))
        if REST > 0:
            more = tl.load(codes + key_at + other, mask=is_read[:, None] & (other < REST), other=0.0).to(tl.float16)
            score = add_product(score, rest, tl.trans(more))
        score, value = score * size[:, None], key
        if VALUES > 0:
            value = tl.load(codes + VALUES * HEAD_DIM + key_at + feature, mask=mask, other=0.0).to(tl.float16)
        seen = (at[None, :] >= first[:, None]) & (at[None, :] <= position[:, None])
        if scales_ptr is not None:
            score *= tl.load(scales_ptr + vector + line, mask=is_read, other=0.0)[None, :]
        elif (tl.maximum(low, step * STEP) < all_from) | (tl.minimum(high, step * STEP + STEP) > all_until + 1):
            # A value that only other rows see may be NaN, and 0 x NaN is NaN. Rows that see it become NaN as a whole.
            exact = value.to(tl.float32)
            score += tl.sum(exact * 0.0, 1)[None, :]
            value = tl.where(tl.abs(exact) < float("inf"), value, 0.0)
        if IS_CAPPED:
            score = activated(score, cap, "softcap")
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        base = finite_base(higher)
        correction, best = tl.exp(best - base), higher
        weight = tl.exp(score - base[:, None]) * RANGE
        total = total * correction + tl.sum(weight, 1)
        sums *= correction[:, None]
        if scales_ptr is not None:
            scale = tl.load(scales_ptr + VALUES + vector + line, mask=is_read, other=0.0)
            weight = tl.where(seen, weight * scale[None, :], 0.0)
            most = tl.maximum(tl.max(weight, 1), SMALLEST)
            products = add_product(tl.zeros_like(sums), weight * (1.0 / most * RANGE)[:, None], value)
            sums = tl.fma(products, (most / RANGE)[:, None], sums)
        else:
            sums = add_product(sums, weight, value)
    return best, total / RANGE, sums / RANGE


@triton.jit
def part_of_lanes(
    query: tl.tensor, rest: tl.tensor, first: tl.tensor, position: tl.tensor, low: tl.tensor, high: tl.tensor,
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, pages: tl.tensor, path_ptr: tl.tensor, cap: tl.tensor,
    PAGE_VECTORS: tl.constexpr, VALUES: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    STEP: tl.constexpr, IS_CAPPED: tl.constexpr, PAGE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
) -> Any:  # fmt: skip
    """Use products of fp32. Each lane has its own best, total and sums until the end of the part."""
    N: tl.constexpr = query.shape[0]
    REST: tl.constexpr = HEAD_DIM - VALUE_DIM
    lane, features = tl.arange(0, LANES), tl.arange(0, query.shape[1])[None, None, :]
    best, total = tl.full((N, LANES), float("-inf"), tl.float32), tl.zeros((N, LANES), tl.float32)
    sums = tl.zeros((N, LANES, query.shape[1]), tl.float32)
    for step in range(low // STEP, (high + STEP - 1) // STEP):
        higher, turns = best, nothing()
        if path_ptr is None:
            vector = tl.load(pages + step * STEP // PAGE).to(tl.int64) * PAGE_VECTORS + step * STEP % PAGE
            codes = codes_ptr + vector * HEAD_DIM
        for turn in tl.static_range(STEP // LANES):
            line = turn * LANES + lane
            at = step * STEP + line
            is_seen = (at >= low) & (at < high)
            if path_ptr is not None:
                vector, line = vector_on_path(path_ptr, pages, at, is_seen, PAGE_VECTORS, PAGE), line * 0
                codes = codes_ptr + vector[None, :, None] * HEAD_DIM
            key_at = line[None, :, None] * HEAD_DIM
            loaded = is_seen[None, :, None] & (features < VALUE_DIM)
            key = tl.load(codes + key_at + (REST + features), mask=loaded, other=0.0).to(tl.float32)
            value = key
            if VALUES > 0:
                value = tl.load(codes + VALUES * HEAD_DIM + key_at + features, mask=loaded, other=0.0)
            seen, value_scale = is_seen[None, :], 0.0
            if ROWS > 1:
                seen = (at[None, :] >= first[:, None]) & (at[None, :] <= position[:, None])
            score = tl.sum(dot_fours(query[:, None, :], key), 2)
            if REST > 0:
                other = tl.arange(0, rest.shape[1])[None, None, :]
                more = tl.load(codes + key_at + other, mask=is_seen[None, :, None] & (other < REST), other=0.0)
                score += tl.sum(dot_fours(rest[:, None, :], more.to(tl.float32)), 2)
            if scales_ptr is not None:
                score *= tl.load(scales_ptr + vector + line, mask=is_seen, other=0.0)[None, :]
                value_scale = tl.load(scales_ptr + VALUES + vector + line, mask=is_seen, other=0.0)[None, :]
            if IS_CAPPED:
                score = activated(score, cap, "softcap")
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(higher, score)
            turns += ((score, seen, value, value_scale),)
        base = finite_base(higher)
        correction, best = tl.exp(best - base), higher
        total, sums = total * correction, sums * correction[:, :, None]
        for turn in tl.static_range(STEP // LANES):
            score, seen, value, value_scale = turns[turn]
            weight, value = tl.exp(score - base), value.to(tl.float32)
            total += weight
            if scales_ptr is not None:
                weight = tl.where(seen, weight * value_scale, 0.0)
            elif ROWS > 1:  # a value that only other rows see may be infinite, and 0 x inf is NaN
                value = tl.where(seen[:, :, None], value, 0.0)
            sums = tl.fma(weight[:, :, None], value, sums)
    greatest = tl.max(best, 1)
    share = tl.exp(best - finite_base(greatest)[:, None])
    return greatest, tl.sum(total * share, 1), tl.sum(sums * share[:, :, None], 1)
