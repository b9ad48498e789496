"""Attention of m new rows, of any mixture of sequences, against the KV cache.

out[r, h] = sum over p of softmax_p(score[p]) v[p],  p = max(0, position + 1 - window) .. position,
score[p] = scale q[r, h] k[p], or for models that cap it (arXiv 2408.00118) cap tanh(scale q[r, h] k[p] / cap),
with k, v of the row's own sequence and of key head h // (n_heads / n_kv_heads); m rows, d = head_dim. A model may have
a sink per head (gpt-oss): one more score in the softmax, for no value. Values may be the last `value_dim` features of
the stored ones, as in latent attention, whose key ends with its value.

Online softmax (arXiv 1805.02867, 2205.14135) over blocks of 64 absolute positions, in order, that starts with the sink
as maximum and 1 as sum. A row's bits depend on
its query, its position, the window and the keys and values it sees, never on other rows, the capacity or the threads.
Within a block, the product with key p is summed in 16 lanes over features and then over lanes in a fixed tree; each
output feature adds the block's values in order of position.

A work item is one key head and up to 64 queries: consecutive rows of one sequence with all their query heads. Items
are smaller for long heads, or when threads would stay idle. An item's queries read and convert keys and values once,
together (attention_block.py), in tiles of 2, 4 or 8 queries. Each size of tile is a function of its own, compiled when
an item first needs it: one takes 5 s (AMD EPYC, AVX-512, Nov 2026). An item uses 231 KB of its thread's stack.

A row of a draft tree is an item of its own. From its branch on, its keys and values are gathered from the slots of its
path, block by block, so that its bits are those of a chain along its path.

Layout: docs/FORMAT.md describes the cache. Keys and values of one sequence are (n_layers, n_kv_heads, capacity, d),
contiguous, fp32, fp16 (as uint16 bits) or int8; int8 has fp32 scales (n_layers, n_kv_heads, capacity). Queries are
(m, features) fp32, heads side by side from feature `first`. d <= 1024; 1 <= n_heads / n_kv_heads <= 128.

Speed on a Xeon (Sapphire Rapids, AVX-512), Nov 2026, heads of 128, one thread, where memory delivers 14.5 GB/s: one
row after a 2,048-token context reads 14.7 GB/s of an fp16 cache, 12.1 with 4 query heads per key head, 10.7 with 8; of
int8 13.5, 10.0 and 5.9, which arithmetic limits. From the L2 cache, 1,024 fp16 positions of a key head cost 12.6 us
for one row, 16 for 2, 24 for 4, 42 for 8, 84 for 16; 128 rows reach 112 GFLOPS, where multiply-adds in registers reach
215. One row of a model with one key head stays on one thread.
"""

from functools import cache
from math import sqrt
from typing import Any

import numpy as np
from numba import types
from numba.core.registry import cpu_target

from hetero_ee_cpu_ops.attention.attention_block import (
    BLOCK,
    FRAME_BYTES,
    MAX_FEATURES,
    MAX_HEAD_DIM,
    MAX_QUERIES,
    SCALES,
    begin_query,
    block_scores,
    block_values,
    finish_query,
    gather_scales,
)
from hetero_ee_cpu_ops.attention.block_weights import block_weights
from hetero_ee_cpu_ops.attention.kv_table import (
    BRANCH,
    CAPACITY,
    COLUMNS,
    DTYPES,
    KEY_SCALES,
    KEYS,
    PATH,
    POSITION,
    VALUE_SCALES,
    VALUES,
)
from hetero_ee_cpu_ops.attention.work_items import (
    NEEDS_EIGHT,
    NEEDS_TWO,
    TILE_QUERIES,
    count_parts,
    needed_tiles,
    part_queries,
    tile_bit,
)
from hetero_ee_cpu_ops.jit.atomics import call_chunk
from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import NO_ARGUMENTS, Chunk, array_in, array_out, entry
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.simd.bytes import target_has, word
from hetero_ee_cpu_ops.simd.floats import element_bytes, read_float, scratch, write_float, write_integer

ELEMENTS = {"fp32": np.float32(0), "fp16": np.uint16(0), "int8": np.int8(0)}  # type of a stored value
MAX_GROUP = 128  # query heads per key head
SHARED_FROM = 32_000  # positions x query features: 5 us of one thread with a warm cache, 20 us otherwise
QUERY, QUERY_STRIDE, TABLE, OUT, N_ROWS, N_KV_HEADS, GROUP, HEAD_DIM, LAYER, WINDOW, FACTOR, ITEM_QUERIES, CAP = range(
    13
)
TWO, EIGHT = 13, 14  # addresses of the chunk functions with tiles of 2 and 8 queries; 0 if no item needs them
SINKS = 15  # their address, 0 if the model has none
VALUE_DIM = 16
N_ARGUMENTS, ARGUMENT_BYTES = 17, 136
NO_SINKS = np.zeros(0, np.float32)
# Addresses of these functions before they are compiled, by _is_wide(). 0 means that an item may need one. Without
# AVX-512 nothing calls them, so that 1, which is never used, keeps them from being compiled.
NOT_YET = {True: (0, 0), False: (1, 1)}


@inner
def _part(arguments: int, number: int) -> Any:
    """Return the range of queries (first, end) of a key head's work item `number`."""
    n_rows, group = word(arguments, N_ROWS), word(arguments, GROUP)
    return part_queries(word(arguments, TABLE), n_rows, group, word(arguments, ITEM_QUERIES), number)


@inner
def _begin(arguments: int, frame: int, head: int, first: int, end: int, height: int) -> Any:
    """Copy queries first..end-1 to the frame, padded to tiles of `height`; return the range of positions seen."""
    n_features, group = word(arguments, HEAD_DIM), word(arguments, GROUP)
    padded, window, low, high = -(-n_features // 16) * 16, word(arguments, WINDOW), 1 << 62, 0
    sinks = word(arguments, SINKS)
    for number in range(-(-(end - first) // height) * height):
        query = min(first + number, end - 1)
        row = query // group
        position = word(word(arguments, TABLE) + 8 * COLUMNS * row, POSITION)
        seen = max(0, position + 1 - window) if window else 0
        source, query_head = word(arguments, QUERY) + row * word(arguments, QUERY_STRIDE), head * group + query % group
        source += 4 * query_head * n_features
        sink = sinks + 4 * query_head if sinks else 0
        begin_query(frame, number, source if first + number < end else 0, n_features, padded, seen, position + 1, sink)
        low, high = min(low, seen), max(high, position + 1)
    return low, high


@inner
def _attend(tile: Any, rows: Any, arguments: int, head: int, first: int, end: int, element: Any) -> None:
    """Compute attention of queries first..end-1 of one sequence and key head, in tiles of len(rows) queries."""
    n_kv_heads, group, head_dim = word(arguments, N_KV_HEADS), word(arguments, GROUP), word(arguments, HEAD_DIM)
    padded, n_queries, value_dim = -(-head_dim // 16) * 16, end - first, word(arguments, VALUE_DIM)
    factor, cap = read_float(arguments + 8 * FACTOR), read_float(arguments + 8 * CAP)
    frame = scratch(FRAME_BYTES)
    low, high = _begin(arguments, frame, head, first, end, len(rows))
    line_at = word(arguments, TABLE) + 8 * COLUMNS * (first // group)
    line = (word(arguments, LAYER) * n_kv_heads + head) * word(line_at, CAPACITY)  # of this head's position 0
    row_bytes = head_dim * element_bytes(element)
    keys, values = word(line_at, KEYS) + line * row_bytes, word(line_at, VALUES) + line * row_bytes
    values += (head_dim - value_dim) * element_bytes(element)
    key_scales, value_scales = word(line_at, KEY_SCALES), word(line_at, VALUE_SCALES)
    branch = word(line_at, BRANCH)
    for start in range(low & -BLOCK, high, BLOCK):
        seen, until, k, v = (
            max(low - start, 0),
            min(high - start, BLOCK),
            keys + start * row_bytes,
            values + start * row_bytes,
        )
        k_scales = key_scales + 4 * (line + start) if key_scales else 0
        v_scales = value_scales + 4 * (line + start) if value_scales else 0
        next_keys = k + BLOCK * row_bytes if start + BLOCK < high else 0
        path = word(line_at, PATH) if start + BLOCK > branch else 0
        if path and key_scales:
            gather_scales(start, seen, until, path, branch, k_scales, frame + SCALES)
            gather_scales(start, seen, until, path, branch, v_scales, frame + SCALES + 4 * BLOCK)
            k_scales, v_scales = frame + SCALES, frame + SCALES + 4 * BLOCK
        block_scores(tile, rows, frame, n_queries, head_dim, padded, start, seen, until, k, v, path, branch, element)
        block_weights(frame, n_queries, padded, start, factor, cap, k_scales, v_scales)
        block_values(
            tile, rows, frame, n_queries, value_dim, row_bytes, padded, start, seen, until, v, next_keys, path, branch,
            element,
        )  # fmt: skip
    for number in range(n_queries):
        query = first + number
        at = (query // group * n_kv_heads + head) * group + query % group
        finish_query(frame, number, word(arguments, OUT) + 4 * at * value_dim, value_dim, padded)


@inner
def _function(arguments: int, number: int) -> int:
    """Return the address of the chunk function with the smallest tiles that suit an item; 0 for tiles of 4.

    Items of 2 queries use tiles of 2, items of 6 to 8 use a tile of 8. 5 queries use 4 + 1.
    """
    first, end = _part(arguments, number)
    size = tile_bit(end - first)
    return word(arguments, TWO) if size == NEEDS_TWO else word(arguments, EIGHT) if size == NEEDS_EIGHT else 0


@cache
def _chunk(kind: str, n_queries: int) -> Chunk:
    """Return the chunk function for one kind of cache, with tiles of n_queries queries.

    The one with tiles of 4 calls the others for items that suit them. Without AVX-512 it is the only one and its tiles
    have 2 queries, because AVX2 has only 16 registers, of half the width.
    """
    element = ELEMENTS[kind]
    tile, rows = ((0,) * 16, (0,) * n_queries) if _is_wide() else ((0,) * 4, (0,) * 2)
    calls_others = n_queries == TILE_QUERIES and _is_wide()

    def chunk(arguments: int, index: int) -> None:
        n_kv_heads = word(arguments, N_KV_HEADS)
        number, head = index // n_kv_heads, index % n_kv_heads
        other = _function(arguments, number) if calls_others else 0
        if other != 0:
            call_chunk(other, arguments, index)
        else:
            first, end = _part(arguments, number)
            _attend(tile, rows, arguments, head, first, end, element)

    return Chunk(chunk)


def _is_wide() -> bool:
    return bool(target_has(cpu_target.target_context, "avx512f"))


@entry(
    types.int64(
        *[types.int64] * 3, array_out(types.int64, 1), array_in(types.float32, 2), array_in(types.int64, 2),
        array_out(types.float32, 2), *[types.int64] * 7, types.float32, types.float32, array_in(types.float32, 1),
    )
)  # fmt: skip
def _enter(
    function: int, two: int, eight: int, arguments: Any, queries: Any, table: Any, out: Any, first: int, layer: int,
    n_kv_heads: int, head_dim: int, value_dim: int, window: int, n_threads: int, scale: float, cap: float, sinks: Any,
) -> int:  # fmt: skip
    """Check the shapes, then compute everything or prepare the work for several threads.

    Args:
        two, eight: addresses of the functions with tiles of 2 and 8 queries, 0 if they are not compiled.

    Returns:
        A code as in activate.py. Below -1, functions that are not compiled yet are needed and nothing was computed: the
        code is -1 minus their bits.
    """
    m, group = out.shape[0], out.shape[1] // (n_kv_heads * value_dim)
    n_features = group * n_kv_heads * head_dim
    if table.shape != (m, COLUMNS) or queries.shape[0] != m or first < 0 or window < 0:
        return -1
    if group * n_kv_heads * value_dim != out.shape[1] or first + n_features > queries.shape[1] or group > MAX_GROUP:
        return -1
    if sinks.size != 0 and sinks.size != group * n_kv_heads:
        return -1
    n_positions = 0
    for row in range(m):
        position = table[row, POSITION]
        n_positions += min(position + 1, window) if window else position + 1
    n_threads = 1 if n_positions * n_features < SHARED_FROM else n_threads
    size = min(MAX_QUERIES, MAX_FEATURES // (-(-head_dim // 16) * 16)) // TILE_QUERIES * TILE_QUERIES
    n_parts = count_parts(table.ctypes.data, m, group, size)
    while n_parts * n_kv_heads < n_threads and size > TILE_QUERIES:  # idle threads cost more than reading keys twice
        size = size // (2 * TILE_QUERIES) * TILE_QUERIES
        n_parts = count_parts(table.ctypes.data, m, group, size)
    lacking = (0 if two else NEEDS_TWO) | (0 if eight else NEEDS_EIGHT)
    if lacking:
        lacking &= needed_tiles(table.ctypes.data, m, group, size)
        if lacking:
            return -1 - lacking
    alone = n_threads == 1
    if not alone and arguments.size == 0:
        return n_parts * n_kv_heads
    address = scratch(ARGUMENT_BYTES) if alone else arguments.ctypes.data
    write_integer(queries.ctypes.data + 4 * first, address + 8 * QUERY)
    write_integer(4 * queries.shape[1], address + 8 * QUERY_STRIDE)
    write_integer(table.ctypes.data, address + 8 * TABLE)
    write_integer(out.ctypes.data, address + 8 * OUT)
    write_integer(m, address + 8 * N_ROWS)
    write_integer(n_kv_heads, address + 8 * N_KV_HEADS)
    write_integer(group, address + 8 * GROUP)
    write_integer(head_dim, address + 8 * HEAD_DIM)
    write_integer(value_dim, address + 8 * VALUE_DIM)
    write_integer(layer, address + 8 * LAYER)
    write_integer(window, address + 8 * WINDOW)
    write_float(np.float32(scale), address + 8 * FACTOR)
    write_float(np.float32(cap), address + 8 * CAP)
    write_integer(two, address + 8 * TWO)
    write_integer(eight, address + 8 * EIGHT)
    write_integer(size, address + 8 * ITEM_QUERIES)
    write_integer(sinks.ctypes.data if sinks.size else 0, address + 8 * SINKS)
    if not alone:
        return n_parts * n_kv_heads
    for index in range(n_parts * n_kv_heads):
        call_chunk(function, address, index)
    return 0


class Attention:
    """Attention operation for models of one shape. Threads may share it.

    Args:
        kind: how the cache is stored, a key of kv_table.DTYPES.
        scale: factor of the scores, 1 / sqrt(head_dim) if None.
        cap: limit of the scores, 0 for none.
        value_dim: size of a value, which is the last features of a stored one; head_dim if None.

    Raises:
        ValueError: if n_kv_heads does not divide n_heads, there are more than 128 query heads per key head, head_dim is
            above 1024, value_dim is above head_dim, or the kind is unknown.
    """

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        kind: str,
        pool: ThreadPool | None = None,
        *,
        scale: float | None = None,
        cap: float = 0.0,
        value_dim: int | None = None,
    ) -> None:
        if min(n_layers, n_heads, n_kv_heads, head_dim) < 1 or n_heads % n_kv_heads or n_heads > MAX_GROUP * n_kv_heads:
            raise ValueError(f"{n_heads} query heads of {head_dim} cannot share {n_kv_heads} key heads equally.")
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"Heads of {head_dim} features are too long; at most {MAX_HEAD_DIM} are supported.")
        if value_dim is not None and not 1 <= value_dim <= head_dim:
            raise ValueError(f"Values of {value_dim} features are not part of {head_dim}; choose 1 to {head_dim}.")
        if kind not in DTYPES:
            raise ValueError(f"Unknown KV cache type {kind}; choose one of {', '.join(DTYPES)}.")
        self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim = n_layers, n_heads, n_kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self._scale, self._cap = 1.0 / sqrt(head_dim) if scale is None else scale, cap
        self._pool, self._n_threads, self._kind = pool, pool.n_threads if pool else 1, kind
        self._functions: tuple[int, int, int] | None = None  # addresses, by tiles of 4, 2 and 8 queries

    def attend(
        self,
        queries: Any,
        table: Any,
        layer: int,
        window: int | None,
        out: Any = None,
        *,
        first: int = 0,
        sinks: Any = NO_SINKS,
    ) -> Any:
        """Compute attention of m rows whose keys and values are in the cache already.

        Args:
            queries: fp32 (m, features), the heads side by side from feature `first`.
            table: kv_table(...) of the m rows.
            window: number of positions that a row sees, including its own; None for all.
            out: fp32 (m, n_heads * value_dim), allocated if None.
            sinks: fp32 (n_heads,), empty for none.

        Returns:
            out

        Raises:
            ValueError: if a shape, dtype or layout does not fit, or the layer does not exist.
        """
        if out is None:
            out = np.empty((queries.shape[0], self.n_heads * self.value_dim), np.float32)
        if not 0 <= layer < self.n_layers or (window is not None and window < 1):
            raise ValueError(f"Layer {layer} of {self.n_layers} or window {window} is out of range.")
        shape = (first, layer, self.n_kv_heads, self.head_dim, self.value_dim, window or 0)
        call = (queries, table, out, *shape, self._n_threads, self._scale, self._cap, sinks)
        functions = self._functions or self._compiled(0)
        status = _enter(*functions, NO_ARGUMENTS, *call)
        if status < -1:
            functions = self._compiled(-1 - status)
            status = _enter(*functions, NO_ARGUMENTS, *call)
        if status < 0 or out.shape[1] != self.n_heads * self.value_dim:
            raise ValueError(
                f"Queries {queries.shape} from feature {first}, KV table {table.shape}, output {out.shape} and sinks "
                f"{sinks.shape} do not fit {self.n_heads} heads of {self.head_dim}."
            )
        if status > 0 and self._pool is not None:
            arguments = np.empty(N_ARGUMENTS, np.int64)
            _enter(*functions, arguments, *call)
            self._pool.run(functions[0], arguments, status)
        return out

    def _compiled(self, bits: int) -> tuple[int, int, int]:
        """Compile or load the chunk functions that `bits` selects.

        Returns:
            Addresses of the functions with tiles of 4, 2 and 8 queries; those not compiled yet keep NOT_YET's value.
        """
        four, *others = self._functions or (_chunk(self._kind, TILE_QUERIES).address, *NOT_YET[_is_wide()])
        for place, (bit, n_queries) in enumerate(((NEEDS_TWO, 2), (NEEDS_EIGHT, 8))):
            if bits & bit:
                others[place] = _chunk(self._kind, n_queries).address
        self._functions = four, others[0], others[1]
        return self._functions
