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

One row, 32 heads of 128 over 8 key heads, fp16, one thread (Zen 5, AVX-512, Nov 2026): 7.8 us at 16 positions, 106 us
at 512, 455 us at 2048 (18 GB/s of cache). A work item is a row and a key head, so one row of a model with one key head
stays on one thread.
"""

from math import sqrt
from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.atomics import call_chunk
from hetero_ee_cpu_ops.kernel_files import compiled
from hetero_ee_cpu_ops.kv_table import CAPACITY, COLUMNS, DTYPES, KEY_SCALES, KEYS, POSITION, VALUE_SCALES, VALUES
from hetero_ee_cpu_ops.lazy import NO_ARGUMENTS, Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.simd.bytes import word, zeros
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
    multiply_add,
    read_float,
    scratch,
    spread,
    store16,
    store_lanes,
    subtract,
    write_float,
    write_integer,
)
from hetero_ee_cpu_ops.simd.tuples import (
    add_products,
    add_products_lanes,
    add_weighted,
    load_scaled,
    store_sums,
    store_vectors,
)
from hetero_ee_cpu_ops.thread_pool import ThreadPool

F32, HALF, BYTE, MINUS_INFINITY = np.float32(0), np.uint16(0), np.int8(0), np.float32(-np.inf)  # F32 .. BYTE: stored as
BLOCK = 64  # positions between two rescalings: 4 registers of scores; a block's keys (fp32, d 128) fit an L1 cache
MAX_GROUP = 128  # query heads of one key head; their running maxima and sums lie on the stack
SHARED_FROM = 32_000  # positions x query features: 5 us of one thread where the cache is warm, 20 where it is not
N_ARGUMENTS = 10


@compiled
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
def _weigh(
    rows: Any, weights: int, values: int, n: int, head_dim: int, correction: Any, out: int, element: Any
) -> None:
    """16 len(rows) features: out = out * correction + sum over n positions of weight x value."""
    totals = load_scaled(rows, out, correction)
    for position in range(n):
        at = values + position * head_dim * element_bytes(element)
        totals = add_weighted(totals, weights + 4 * position, at, element)
    store_vectors(totals, out)


@compiled
def _weigh_lanes(
    weights: int, values: int, n: int, head_dim: int, count: int, correction: Any, out: int, element: Any
) -> None:
    """The last `count` features of a head."""
    total = multiply(load_lanes(out, 0, count, F32), spread(correction))
    for position in range(n):
        value = load_lanes(values + position * head_dim * element_bytes(element), 0, count, element)
        total = multiply_add(value, spread(read_float(weights + 4 * position)), total)
    store_lanes(total, out, count, F32)


@compiled
def _weighted_values(weights: int, values: int, n: int, head_dim: int, correction: Any, out: int, element: Any) -> None:
    i = 0
    while i + 64 <= head_dim:
        _weigh(
            (0, 0, 0, 0), weights, values + i * element_bytes(element), n, head_dim, correction, out + 4 * i, element
        )
        i += 64
    while i + 16 <= head_dim:
        _weigh((0,), weights, values + i * element_bytes(element), n, head_dim, correction, out + 4 * i, element)
        i += 16
    if i < head_dim:
        at = values + i * element_bytes(element)
        _weigh_lanes(weights, at, n, head_dim, head_dim - i, correction, out + 4 * i, element)


@compiled
def _block(
    query: int,
    keys: int,
    values: int,
    key_scales: int,
    value_scales: int,
    first: int,
    end: int,
    head_dim: int,
    factor: Any,
    state: int,
    out: int,
    element: Any,
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


@compiled
def _finish(out: int, total: Any, head_dim: int) -> None:
    inverse = spread(np.float32(1.0 / total))
    for i in range(0, head_dim, 16):
        count = min(16, head_dim - i)
        store_lanes(multiply(load_lanes(out + 4 * i, 0, count, F32), inverse), out + 4 * i, count, F32)


@compiled
def _item(arguments: int, index: int, element: Any) -> None:
    """One row and key head, with all its query heads."""
    queries, table, out, layer = word(arguments, 0), word(arguments, 2), word(arguments, 3), word(arguments, 7)
    n_kv_heads, group, head_dim = word(arguments, 4), word(arguments, 5), word(arguments, 6)
    window, factor = word(arguments, 8), read_float(arguments + 72)
    row, head = index // n_kv_heads, index % n_kv_heads
    line_at = table + 8 * COLUMNS * row
    capacity, position = word(line_at, CAPACITY), word(line_at, POSITION)
    line = (layer * n_kv_heads + head) * capacity  # of position 0 of this layer and head
    row_bytes = head_dim * element_bytes(element)
    keys, values = word(line_at, KEYS) + line * row_bytes, word(line_at, VALUES) + line * row_bytes
    key_scales, value_scales = word(line_at, KEY_SCALES), word(line_at, VALUE_SCALES)
    query = queries + row * word(arguments, 1) + 4 * head * group * head_dim
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


def _chunk_fp32(arguments: int, index: int) -> None:
    _item(arguments, index, F32)


def _chunk_fp16(arguments: int, index: int) -> None:
    _item(arguments, index, HALF)


def _chunk_int8(arguments: int, index: int) -> None:
    _item(arguments, index, BYTE)


CHUNKS = {"fp32": Chunk(_chunk_fp32), "fp16": Chunk(_chunk_fp16), "int8": Chunk(_chunk_int8)}


@entry(
    types.int64(
        types.int64, array_out(types.int64, 1), array_in(types.float32, 2), array_in(types.int64, 2),
        array_out(types.float32, 2), *[types.int64] * 5, types.boolean,
    )
)  # fmt: skip
def _enter(
    function: int, arguments: Any, queries: Any, table: Any, out: Any, first: int, layer: int, n_kv_heads: int,
    head_dim: int, window: int, alone: bool,
) -> int:  # fmt: skip
    """-1 where a shape is wrong; 0 when done; else the number of chunks to share, their arguments written if given."""
    m, n_features = out.shape
    group = n_features // (n_kv_heads * head_dim)
    if table.shape != (m, COLUMNS) or queries.shape[0] != m or first < 0 or window < 0:
        return -1
    if group * n_kv_heads * head_dim != n_features or first + n_features > queries.shape[1] or group > MAX_GROUP:
        return -1
    n_positions = 0
    for row in range(m):
        position = table[row, POSITION]
        n_positions += min(position + 1, window) if window else position + 1
    alone = alone or n_positions * n_features < SHARED_FROM
    if not alone and arguments.size == 0:
        return m * n_kv_heads
    address = scratch(80) if alone else arguments.ctypes.data
    write_integer(queries.ctypes.data + 4 * first, address)
    write_integer(4 * queries.shape[1], address + 8)
    write_integer(table.ctypes.data, address + 16)
    write_integer(out.ctypes.data, address + 24)
    write_integer(n_kv_heads, address + 32)
    write_integer(group, address + 40)
    write_integer(head_dim, address + 48)
    write_integer(layer, address + 56)
    write_integer(window, address + 64)
    write_float(np.float32(1.0 / sqrt(head_dim)), address + 72)
    if not alone:
        return m * n_kv_heads
    for index in range(m * n_kv_heads):
        call_chunk(function, address, index)
    return 0


class Attention:
    """One model's attention. kind: how the cache is stored, one of kv_table.DTYPES. Safe to share between threads.

    Raises ValueError for head counts that don't divide, more than 128 query heads a key head, or an unknown kind.
    """

    def __init__(
        self, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, kind: str, pool: ThreadPool | None = None
    ) -> None:
        if min(n_layers, n_heads, n_kv_heads, head_dim) < 1 or n_heads % n_kv_heads or n_heads > MAX_GROUP * n_kv_heads:
            raise ValueError(f"{n_heads} query heads of {head_dim} don't share {n_kv_heads} key heads equally.")
        if kind not in DTYPES:
            raise ValueError(f"no cache is called {kind}; there are {', '.join(DTYPES)}.")
        self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim = n_layers, n_heads, n_kv_heads, head_dim
        self._pool, self._alone, self._chunk = pool, pool is None, CHUNKS[kind]

    def attend(
        self, queries: Any, table: Any, layer: int, window: int | None, out: Any = None, *, first: int = 0
    ) -> Any:
        """queries: fp32 (m, features), the heads from feature `first` on; table: kv_table's of the m rows;
        window: positions seen, the row's own included, None for all; out: fp32 (m, n_heads x head_dim). Returns out.

        Each row's own key and value must be written already. Raises ValueError for other shapes, dtypes or layouts.
        """
        if out is None:
            out = np.empty((queries.shape[0], self.n_heads * self.head_dim), np.float32)
        if not 0 <= layer < self.n_layers or (window is not None and window < 1):
            raise ValueError(f"layer {layer} of {self.n_layers}, window {window}.")
        call = (queries, table, out, first, layer, self.n_kv_heads, self.head_dim, window or 0, self._alone)
        status = _enter(self._chunk.address, NO_ARGUMENTS, *call)
        if status < 0 or out.shape[1] != self.n_heads * self.head_dim:
            raise ValueError(
                f"queries {queries.shape} from feature {first}, table {table.shape} and out {out.shape} don't fit "
                f"{self.n_heads} heads of {self.head_dim}."
            )
        if status > 0 and self._pool is not None:
            arguments = np.empty(N_ARGUMENTS, np.int64)
            _enter(self._chunk.address, arguments, *call)
            self._pool.run(self._chunk.address, arguments, status)
        return out
