"""y[m, N] = 2^e x[m, K] W^T, W in int4 or int8 tiles (docs/FORMAT.md), x quantized to int8 on the fly (quantize.py).

Symbols: N weight rows in blocks of 16, K columns in G groups of 32, m rows of activations.
Every output is summed group after group with one fused multiply-add each, whatever m, the other rows, the threads or
the chunks are: row t's bits depend on row t alone. Rows are taken 8, 4, 2 and 1 at a time; a width changes how often a
tile is unpacked, never the order of a sum.
Source: derived.  Valid: K <= 2^20 (integer sums stay exact within a group for any K).
Measured: docs/benchmarks.md; tests/bench/bench_cpu_ops.py prints it.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.core.registry import cpu_target

from hetero_ee_cpu_ops.kernel_files import compiled, compiled_chunk
from hetero_ee_cpu_ops.lazy import Chunk
from hetero_ee_cpu_ops.quantize import (
    BYTES_A_GROUP,
    CODE_SCALES,
    CODES,
    GROUP,
    INPUT,
    N_COLUMNS,
    OFFSETS_8,
    OFFSETS_32,
    OFFSETS_128,
    ROW_BLOCK,
    quantize_row_block,
    whole_groups,
)
from hetero_ee_cpu_ops.simd.bytes import prefetch, store_rows, word, zeros, zeros8
from hetero_ee_cpu_ops.simd.floats import read_float
from hetero_ee_cpu_ops.thread_pool import ThreadPool, lead
from hetero_ee_cpu_ops.tile_group import LINEAR, NARROW, NARROW_LIMIT, add_group, has_wide_registers, tile_kind

PREFETCH_BYTES = 8192  # tiles are asked for this far ahead: for m = 4 one thread reads 33 GB/s so, 28 at half (Zen 5)
CHUNK_BYTES = 2**19  # weights in a chunk, at most: 15 us of work; two threads read 42 GB/s so, 36 with a quarter
CHUNKS_A_THREAD = 8  # at least, where the matrix is large enough: a late worker then costs an eighth of its share
MIN_CHUNK_BYTES = 2**15
GROUPS_A_TURN = 8  # where registers hold 8 rows: groups of the upper half before the lower half's, all still in L1
MIN_SHARED_BYTES = 2**18  # weights times rows, 7 us of one thread; below, handing over costs more than it saves
MIN_SHARED_INPUTS = 2**15  # activations to quantize, likewise
# Indices in the argument array of a chunk function; quantize.py has those after them.
TILES, SCALES, TABLE, OFFSETS, OUTPUT, N_GROUPS, N_BLOCKS, N_ROWS = range(8)
BLOCKS_A_CHUNK, FACTOR, BLOCK_BYTES, CHOSEN = range(8, 12)
N_ARGUMENTS = 19


@compiled(nogil=True)
def _row_block(kind: Any, halves: Any, rows: Any, block: int, row: int, arguments: int) -> None:
    """16 outputs for each of len(rows) rows of x from `row` on, in len(halves) parts of the row block."""
    n_groups, tile_bytes = word(arguments, N_GROUPS), 512 if len(kind) == 3 else 256
    offset_bytes = 8 if len(kind) == 4 else 4
    chosen = word(arguments, CHOSEN)  # where the blocks to compute are listed, 0 for all in order
    source = block if chosen == 0 else word(chosen, block)
    tile = word(arguments, TILES) + source * n_groups * tile_bytes
    scales = word(arguments, SCALES) + source * n_groups * 32
    top = row & -8
    r = min(8, word(arguments, N_ROWS) - top)  # rows side by side in this row's block of activations
    entry = top * n_groups + row - top
    codes = word(arguments, CODES) + entry * 32
    scale, offset = word(arguments, CODE_SCALES) + entry * 4, word(arguments, OFFSETS) + entry * offset_bytes
    table = word(arguments, TABLE)
    n = word(arguments, N_BLOCKS) * 64
    out, factor = word(arguments, OUTPUT) + row * n + block * 64, read_float(arguments + 8 * FACTOR)
    if len(halves) == 1:
        totals = zeros(rows)
        for _ in range(n_groups):
            for line in range(tile_bytes // 64):
                prefetch(tile + PREFETCH_BYTES + 64 * line)
            totals = add_group(kind, totals, tile, scales, table, codes, scale, offset)
            tile += tile_bytes
            scales += 32
            codes += r * 32
            scale += r * 4
            offset += r * offset_bytes
        store_rows(totals, factor, out, n)
        return
    upper, lower = zeros8(rows), zeros8(rows)
    for first in range(0, n_groups, GROUPS_A_TURN):
        n_turn = min(GROUPS_A_TURN, n_groups - first)
        for group in range(n_turn):
            at = tile + group * tile_bytes
            for line in range(tile_bytes // 64):
                prefetch(at + PREFETCH_BYTES + 64 * line)
            c, s, o = codes + group * r * 32, scale + group * r * 4, offset + group * r * offset_bytes
            upper = add_group(kind, upper, at, scales + group * 32, table, c, s, o)
        for group in range(n_turn):
            at = tile + group * tile_bytes + 32
            c, s, o = codes + group * r * 32, scale + group * r * 4, offset + group * r * offset_bytes
            lower = add_group(kind, lower, at, scales + group * 32 + 16, table, c, s, o)
        tile += n_turn * tile_bytes
        scales += n_turn * 32
        codes += n_turn * r * 32
        scale += n_turn * r * 4
        offset += n_turn * r * offset_bytes
    store_rows(upper, factor, out, n)
    store_rows(lower, factor, out + 32, n)


def _quantize_chunk(arguments: int, index: int) -> None:
    quantize_row_block(arguments, index, word(arguments, N_ROWS), word(arguments, N_GROUPS))


QUANTIZE = Chunk(_quantize_chunk)


@cache  # loaded code is never given back, and each copy takes two of the 65,530 mappings that a process may have
def _chunk_function(kind: Any) -> Any:
    """The compiled function of one kind of tile; compiling takes a second or two, from the disk cache 0.1 s."""
    halves = (0,) if has_wide_registers(cpu_target.target_context) else (0, 0)  # a tuple's length is part of its type

    @compiled_chunk
    def chunk(arguments: int, index: int) -> None:
        first = index * word(arguments, BLOCKS_A_CHUNK)
        end = min(first + word(arguments, BLOCKS_A_CHUNK), word(arguments, N_BLOCKS))
        n_rows = word(arguments, N_ROWS)
        for block in range(first, end):
            row = 0
            while n_rows - row >= 8:
                _row_block(kind, halves, (0, 0, 0, 0, 0, 0, 0, 0), block, row, arguments)
                row += 8
            if n_rows - row >= 4:
                _row_block(kind, halves, (0, 0, 0, 0), block, row, arguments)
                row += 4
            if n_rows - row >= 2:
                _row_block(kind, halves, (0, 0), block, row, arguments)
                row += 2
            if n_rows - row >= 1:
                _row_block(kind, halves, (0,), block, row, arguments)

    return chunk


class TileMatrix:
    """A matrix in tiles, its addresses ready for the kernels. Keeps the arrays alive; changes nothing.

    tiles: uint8 (N/16, G, 256) with a codebook, int8 (N/16, G, 512) without; scales: fp16 (N/16, G, 16);
    codebook: 16 integers of -128..127. Raises ValueError for other shapes, types or non-contiguous arrays.
    """

    def __init__(self, tiles: Any, scales: Any, exponent: int, codebook: tuple[int, ...] | None) -> None:
        expected = (256, np.uint8) if codebook is not None else (512, np.int8)
        if tiles.ndim != 3 or (tiles.shape[2], tiles.dtype) != (expected[0], np.dtype(expected[1])):
            raise ValueError(
                f"tiles are {tiles.dtype} {tiles.shape}, expected {expected[1].__name__} (N/16, G, {expected[0]})."
            )
        if scales.shape != (*tiles.shape[:2], 16) or scales.dtype != np.float16:
            raise ValueError(f"scales are {scales.dtype} {scales.shape}, expected float16 {(*tiles.shape[:2], 16)}.")
        if not (tiles.flags.c_contiguous and scales.flags.c_contiguous):
            raise ValueError("tiles and scales must be contiguous.")
        self.n_blocks, self.n_groups = tiles.shape[:2]
        self.kind = tile_kind(cpu_target.target_context, codebook)
        entries = np.tile(np.array(codebook or (0,) * 16, np.int8), 4).view(np.uint8)
        self._table = np.concatenate([entries + np.uint8(NARROW_LIMIT if self.kind == NARROW else 128), entries])
        self._kept = (tiles, scales)
        self.n_bytes = tiles.nbytes + scales.nbytes
        self.block_bytes = tiles[0].nbytes, scales[0].nbytes
        factor = int(np.float32(2.0**exponent).view(np.int32))
        self._arguments = np.zeros(N_ARGUMENTS, np.int64)
        self._arguments[[TILES, SCALES, TABLE]] = [a.ctypes.data for a in (tiles, scales, self._table)]
        self._arguments[[N_GROUPS, N_BLOCKS, FACTOR]] = [self.n_groups, self.n_blocks, factor]
        self._arguments[BLOCK_BYTES] = self.n_bytes // self.n_blocks
        which = {LINEAR: OFFSETS_8, NARROW: OFFSETS_32}.get(self.kind, OFFSETS_128)
        self._arguments[OFFSETS] = which  # at the call, their address

    def fresh_arguments(self) -> Any:
        """A chunk function's arguments with this matrix's part filled; the rest is the caller's."""
        return self._arguments.copy()


@compiled(nogil=True)
def _multiply(
    x: Any, workspace: Any, out: Any, arguments: Any, function: int, quantize: int, shared: int, n_threads: int
) -> None:
    """Quantizes x into the workspace and multiplies; `arguments` comes with the matrix's part filled."""
    n_rows, n_groups = x.shape[0], arguments[N_GROUPS]
    n_row_groups = n_rows * n_groups
    arguments[INPUT], arguments[N_COLUMNS], arguments[OUTPUT] = x.ctypes.data, x.shape[1], out.ctypes.data
    arguments[N_ROWS] = n_rows
    arguments[CODES] = workspace.ctypes.data
    arguments[CODE_SCALES] = arguments[CODES] + n_row_groups * GROUP
    arguments[OFFSETS_8] = arguments[CODE_SCALES] + n_row_groups * 4
    arguments[OFFSETS_128] = arguments[OFFSETS_8] + n_row_groups * 4
    arguments[OFFSETS_32] = arguments[OFFSETS_128] + n_row_groups * 4
    arguments[OFFSETS] = arguments[arguments[OFFSETS]]
    n_quantize = (n_rows + ROW_BLOCK - 1) // ROW_BLOCK
    lead(shared if x.size >= MIN_SHARED_INPUTS else 0, quantize, arguments.ctypes.data, n_quantize)
    n_blocks, block_bytes = arguments[N_BLOCKS], arguments[BLOCK_BYTES]
    chunk_bytes = max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, n_blocks * block_bytes // (CHUNKS_A_THREAD * n_threads)))
    blocks = max(1, chunk_bytes // (block_bytes * max(1, n_rows // ROW_BLOCK)))
    if n_blocks * block_bytes * n_rows < MIN_SHARED_BYTES:
        blocks = n_blocks
    arguments[BLOCKS_A_CHUNK] = blocks
    lead(shared, function, arguments.ctypes.data, (n_blocks + blocks - 1) // blocks)


class Matmul:
    """The operation with its compiled functions, made at first use. May be called from several threads."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._functions: dict[Any, Any] = {}

    def __call__(self, x: Any, weight: TileMatrix) -> Any:
        """x fp32 (m, K), contiguous -> y fp32 (m, N padded to 16). Raises ValueError where x doesn't fit."""
        return self._run(x, weight, weight.fresh_arguments(), weight.n_blocks)

    def sliced(self, x: Any, weight: TileMatrix, ids: Any) -> Any:
        """Only the outputs `ids`, int64 (c,): fp32 (m, c), with the bits the whole product gives them.

        A tile's cache line holds 4 columns of 16 rows, so one row costs what its block of 16 does. Raises ValueError
        for an id that has no row.
        """
        is_list = ids.ndim == 1 and ids.dtype == np.int64 and ids.size > 0
        if not is_list or ids.min() < 0 or ids.max() >= weight.n_blocks * 16:
            raise ValueError(f"ids are {ids.dtype} {ids.shape}, expected int64 (c,) of 0..{weight.n_blocks * 16 - 1}.")
        blocks = ids >> 4
        arguments = weight.fresh_arguments()
        arguments[CHOSEN], arguments[N_BLOCKS] = blocks.ctypes.data, ids.size
        product = self._run(x, weight, arguments, ids.size)
        return product[:, np.arange(ids.size) * 16 + (ids & 15)]

    def from_row(self, x: Any, weight: TileMatrix, row: int) -> Any:
        """The outputs from `row` on, with the bits the whole product gives them; nothing before them is read.

        Raises ValueError unless a row block begins there.
        """
        block, rest = divmod(row, 16)
        if rest or not 0 <= block < weight.n_blocks:
            raise ValueError(f"row {row} does not begin one of {weight.n_blocks} blocks of 16 rows.")
        arguments = weight.fresh_arguments()
        arguments[[TILES, SCALES]] += block * np.array(weight.block_bytes)
        arguments[N_BLOCKS] = weight.n_blocks - block
        return self._run(x, weight, arguments, weight.n_blocks - block)

    def _run(self, x: Any, weight: TileMatrix, arguments: Any, n_blocks: int) -> Any:
        x = whole_groups(x, weight.n_groups)
        out = np.empty((x.shape[0], n_blocks * 16), np.float32)
        workspace = np.empty(x.shape[0] * weight.n_groups * BYTES_A_GROUP, np.uint8)
        functions = self._functions.get(weight.kind) or self.compile(weight.kind)
        shared = self._pool.enter()
        try:
            _multiply(x, workspace, out, arguments, *functions, shared, self._pool.n_threads)
        finally:
            self._pool.leave(shared)
        return out

    def compile(self, kind: Any) -> tuple[int, int]:
        """Addresses of the chunk functions that multiply by one kind of tile, and that quantize."""
        self._functions[kind] = addresses = (_chunk_function(kind).address, QUANTIZE.address)
        return addresses
