"""Matrix product y[m, N] = 2^e x[m, K] W^T, W in tiles of 4 to 8 bits (docs/FORMAT.md), x as int8 (quantize.py).

Symbols: N weight rows in blocks of 16, K columns in G groups of 32, m rows of activations. If activations have two
terms, each is a row of its own, and the two products of a row of x are added at the end.
Every output is summed group by group with one fused multiply-add each, whatever m, the other rows, the threads or the
chunks are: row t's bits depend on row t alone. Rows are multiplied 8, 4, 2 and 1 at a time. On targets whose registers
hold 8 weight rows instead of 16, rows are multiplied in fours, with tiles that are unpacked once for all of them, then
2 and 1. The number of rows changes how often a tile is unpacked, never the order of a sum.
Source: derived.  Valid: K <= 2^20 (integer sums stay exact within a group for any K).
Measured: docs/benchmarks.md; tests/bench/bench_cpu_ops.py prints it.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.core.registry import cpu_target

from hetero_ee_cpu_ops.jit.kernel_files import compiled, compiled_chunk, inner
from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.jit.thread_pool import MAX_CHUNKS, ThreadPool, lead
from hetero_ee_cpu_ops.quantize import (
    BYTES_PER_GROUP,
    CODE_SCALES,
    CODES,
    GROUP,
    INPUT,
    N_COLUMNS,
    OFFSETS_8,
    OFFSETS_32,
    OFFSETS_128,
    OFFSETS_HALVES,
    ROW_BLOCK,
    quantize_row_block,
    whole_groups,
)
from hetero_ee_cpu_ops.simd.bytes import pair_sums, prefetch, store_rows, word, zeros
from hetero_ee_cpu_ops.simd.floats import read_float, scratch
from hetero_ee_cpu_ops.simd.tuples import load_tile, store_tile
from hetero_ee_cpu_ops.tile_group import UNPACKED_BYTES, add_group, add_unpacked, unpack_group
from hetero_ee_cpu_ops.tile_kind import (
    BYTES,
    CODEBOOK,
    NARROW,
    NARROW_LIMIT,
    SIX,
    TileKind,
    has_wide_registers,
    offset_bytes,
    scales_bytes,
    tile_bytes,
    tile_kind,
)

PREFETCH_BYTES = 4096  # prefetch distance in the tiles; m = 4 reads 5 % more than with 8,192 (Zen 4, 2026-11-28)
CHUNK_BYTES = 2**19  # most weights in a chunk: 15 us of work; two threads read 42 GB/s, 36 with a quarter of it
CHUNKS_PER_THREAD = 8  # fewest, if the matrix is large enough: a late worker then costs an eighth of its share
MIN_CHUNK_BYTES = 2**15
# Rows of x are multiplied in passes over the weights, so that the codes of a pass stay in a core's L2 cache: one of 512
# rows costs 188 us, 232 without passes, for 4,096 columns; 593 and 799 us for 11,008 (4,096 weight rows, one thread's
# CPU time, AMD EPYC Milan, 2026-11-23).
PASS_CODES = 2**19  # 0.7 MB with their scales and offsets
MIN_PASS_ROWS, MAX_PASS_ROWS = 64, 256  # enough to hide that each pass reads the weights again
GROUPS_PER_STRIP = 8  # if registers hold 8 weight rows: tiles that are unpacked for all rows of a pass, 4 KB
SUMS = GROUPS_PER_STRIP * UNPACKED_BYTES  # offset in a frame, after the tiles: 16 fp32 for each row of a pass
FRAME_BYTES = SUMS + 64 * MAX_PASS_ROWS
FOUR = (0,) * 4
MIN_SHARED_BYTES = 2**18  # weights times rows, 7 us of one thread; below, sharing costs more than it saves
MIN_SHARED_INPUTS = 2**15  # activations to quantize: fewer are not shared over threads
# Indices in the argument array of a chunk function; quantize.py's are in between.
TILES, SCALES, TABLE, OFFSETS, OUTPUT, N_GROUPS, N_BLOCKS, N_ROWS = range(8)
BLOCKS_PER_CHUNK, FACTOR, BLOCK_BYTES, CHOSEN = range(8, 12)
ROWS_PER_PASS, N_PARTS, N_TERMS, SOURCES = 20, 21, 22, 23  # SOURCES: see quantize_row_block
N_ARGUMENTS = 24


@inner
def _operands(kind: TileKind, row: int, arguments: int) -> Any:
    """Return the addresses of a row's codes, scale and offset in group 0, and the number of rows side by side."""
    n_groups = word(arguments, N_GROUPS)
    top = row & -8
    r = min(8, word(arguments, N_ROWS) - top)
    entry = top * n_groups + row - top
    codes, scale = word(arguments, CODES) + entry * 32, word(arguments, CODE_SCALES) + entry * 4
    return codes, scale, word(arguments, OFFSETS) + entry * offset_bytes(kind), r


@inner
def _source(kind: TileKind, block: int, arguments: int) -> Any:
    """Return the addresses of the tiles and scales of a block of 16 weight rows."""
    chosen = word(arguments, CHOSEN)  # address of a list of the blocks to compute, 0 for all in order
    group = (block if chosen == 0 else word(chosen, block)) * word(arguments, N_GROUPS)
    return word(arguments, TILES) + group * tile_bytes(kind), word(arguments, SCALES) + group * scales_bytes(kind)


@inner
def _prefetch_group(kind: TileKind, tile: int, scales: int) -> None:
    """Prefetch the tile and the scales that are PREFETCH_BYTES of tiles further on."""
    for line in range(tile_bytes(kind) // 64):
        prefetch(tile + PREFETCH_BYTES + 64 * line)
    prefetch(scales + PREFETCH_BYTES // tile_bytes(kind) * scales_bytes(kind))


@inner
def _row_block(kind: TileKind, rows: Any, block: int, row: int, arguments: int) -> None:
    """Compute 16 outputs for each of len(rows) rows of x from `row` on."""
    tile, scales = _source(kind, block, arguments)
    codes, scale, offset, r = _operands(kind, row, arguments)
    table, totals = word(arguments, TABLE), zeros(rows)
    for _ in range(word(arguments, N_GROUPS)):
        _prefetch_group(kind, tile, scales)
        totals = add_group(kind, totals, tile, scales, table, codes, scale, offset)
        tile += tile_bytes(kind)
        scales += scales_bytes(kind)
        codes += r * 32
        scale += r * 4
        offset += r * offset_bytes(kind)
    _store(totals, block, row, arguments)


@inner
def _store(totals: Any, block: int, row: int, arguments: int) -> None:
    """Store 16 outputs for rows of codes from `row` on, of which the terms of a row of x are added."""
    n, n_terms = word(arguments, N_BLOCKS) * 64, word(arguments, N_TERMS)
    out, factor = word(arguments, OUTPUT) + row // n_terms * n + block * 64, read_float(arguments + 8 * FACTOR)
    if n_terms == 2:
        store_rows(pair_sums(totals), factor, out, n)
    else:
        store_rows(totals, factor, out, n)


@inner
def _row_block_fours(kind: TileKind, block: int, first: int, end: int, arguments: int, frame: int) -> None:
    """Compute 16 outputs for rows first .. end - 1 of x, four at a time, with tiles that are unpacked only once."""
    tile, scales = _source(kind, block, arguments)
    n_groups, sums = word(arguments, N_GROUPS), frame + SUMS
    for start in range(0, n_groups, GROUPS_PER_STRIP):
        n_strip = min(GROUPS_PER_STRIP, n_groups - start)
        for group in range(n_strip):
            _prefetch_group(kind, tile, scales + group * scales_bytes(kind))
            unpack_group(kind, tile, word(arguments, TABLE), frame + group * UNPACKED_BYTES)
            tile += tile_bytes(kind)
        for row in range(first, end, 4):
            codes, scale, offset, r = _operands(kind, row, arguments)
            codes, scale, offset = (
                codes + start * r * 32,
                scale + start * r * 4,
                offset + start * r * offset_bytes(kind),
            )
            at = sums + 64 * (row - first)
            if start == 0:
                store_tile(zeros(FOUR), FOUR, at, 64)
            for group in range(n_strip):
                group_scales = scales + group * scales_bytes(kind)
                add_unpacked(kind, at, frame + group * UNPACKED_BYTES, group_scales, codes, scale, offset)
                codes += r * 32
                scale += r * 4
                offset += r * offset_bytes(kind)
        scales += n_strip * scales_bytes(kind)
    for row in range(first, end, 4):
        _store(load_tile(FOUR, FOUR, sums + 64 * (row - first), 64), block, row, arguments)


def _quantize_chunk(arguments: int, index: int) -> None:
    n_rows, n_groups, sources = word(arguments, N_ROWS), word(arguments, N_GROUPS), word(arguments, SOURCES)
    if word(arguments, N_TERMS) == 2:
        quantize_row_block((0, 0), arguments, index, n_rows, n_groups, sources)
    else:
        quantize_row_block((0,), arguments, index, n_rows, n_groups, sources)


QUANTIZE = Chunk(_quantize_chunk)


@cache  # Numba never unloads code, and each copy uses two of the 65,530 memory mappings a process may have
def _chunk_function(kind: TileKind) -> Any:
    """Compile the chunk function for one kind of tile in one or two seconds, or load it from the disk in 0.1 s."""
    wide = has_wide_registers(cpu_target.target_context)

    @compiled_chunk
    def chunk(arguments: int, index: int) -> None:
        n_parts = word(arguments, N_PARTS)
        first = index % n_parts * word(arguments, BLOCKS_PER_CHUNK)
        end = min(first + word(arguments, BLOCKS_PER_CHUNK), word(arguments, N_BLOCKS))
        first_row = index // n_parts * word(arguments, ROWS_PER_PASS)
        end_row = min(first_row + word(arguments, ROWS_PER_PASS), word(arguments, N_ROWS))
        if not wide:
            frame = scratch(FRAME_BYTES)
        for block in range(first, end):
            row = first_row
            if wide:
                while end_row - row >= 8:
                    _row_block(kind, (0, 0, 0, 0, 0, 0, 0, 0), block, row, arguments)
                    row += 8
                if end_row - row >= 4:
                    _row_block(kind, (0, 0, 0, 0), block, row, arguments)
                    row += 4
            elif end_row - row >= 4:
                row = end_row & -4
                _row_block_fours(kind, block, first_row, row, arguments, frame)
            if end_row - row >= 2:
                _row_block(kind, (0, 0), block, row, arguments)
                row += 2
            if end_row - row >= 1:
                _row_block(kind, (0,), block, row, arguments)

    return chunk


class TileMatrix:
    """A matrix in tiles, with its addresses prepared for the kernels. Keeps the arrays alive and never changes them.

    Args:
        tiles: uint8 (N/16, G, 256) with a codebook; without, uint8 (N/16, G, 320 or 384) or int8 (N/16, G, 512).
        scales: fp16 (N/16, G, 16 or 32). The last 16 are zero points, for codebook -8 .. 7 and 320 bytes, or the scales
            of columns 16 .. 31, for 384 bytes.
        codebook: 16 integers of -128..127, or None.
        n_terms: int8 terms of each activation, 1 or 2; see quantize.py.

    Raises:
        ValueError: if a shape or dtype does not fit, or an array is not contiguous.
    """

    def __init__(
        self, tiles: Any, scales: Any, exponent: int, codebook: tuple[int, ...] | None, n_terms: int = 1
    ) -> None:
        sizes = tiles.shape[2:] + scales.shape[2:]
        try:
            self.kind = tile_kind(cpu_target.target_context, codebook, *sizes)
        except (KeyError, TypeError) as error:
            shapes = f"Tiles {tiles.shape} and scales {scales.shape}"
            raise ValueError(f"{shapes} with codebook {codebook} fit no layout.") from error
        dtypes = np.dtype(np.int8 if self.kind == BYTES else np.uint8), np.dtype(np.float16)
        if scales.shape[:2] != tiles.shape[:2] or (tiles.dtype, scales.dtype) != dtypes:
            raise ValueError(
                f"Tiles are {tiles.dtype} {tiles.shape} and scales {scales.dtype} {scales.shape}, "
                f"expected {dtypes[0]} and float16 of the same rows and groups."
            )
        if not (tiles.flags.c_contiguous and scales.flags.c_contiguous):
            raise ValueError("Tiles and scales must be contiguous.")
        self.n_blocks, self.n_groups = tiles.shape[:2]
        entries = np.tile(np.array(codebook or (0,) * 16, np.int8), 4).view(np.uint8)
        self._table = np.concatenate([entries + np.uint8(NARROW_LIMIT if self.kind == NARROW else 128), entries])
        self._kept, self.n_terms = (tiles, scales), n_terms
        self.n_bytes = tiles.nbytes + scales.nbytes
        self.block_bytes = tiles[0].nbytes, scales[0].nbytes
        factor = int(np.float32(2.0**exponent).view(np.int32))
        self._arguments = np.zeros(N_ARGUMENTS, np.int64)
        self._arguments[[TILES, SCALES, TABLE]] = [a.ctypes.data for a in (tiles, scales, self._table)]
        self._arguments[[N_GROUPS, N_BLOCKS, FACTOR, N_TERMS]] = [self.n_groups, self.n_blocks, factor, n_terms]
        self._arguments[BLOCK_BYTES] = self.n_bytes // self.n_blocks
        special = {BYTES: OFFSETS_128, CODEBOOK: OFFSETS_128, NARROW: OFFSETS_32, SIX: OFFSETS_HALVES}
        which = special.get(self.kind, OFFSETS_8)
        self._arguments[OFFSETS] = which  # index of the offsets' address, which _multiply puts here

    @property
    def arguments(self) -> Any:
        """The argument array of which fresh_arguments() returns a copy. Callers must not change it."""
        return self._arguments

    def fresh_arguments(self) -> Any:
        """Return an argument array for the chunk function that describes this matrix; the caller adds the rest."""
        return self._arguments.copy()


@compiled(nogil=True)
def rows_per_pass(n_rows: int, n_groups: int) -> int:
    """Return the number of rows in each pass: whole blocks of 8, about equal in all passes."""
    most = max(MIN_PASS_ROWS, min(MAX_PASS_ROWS, PASS_CODES // (n_groups * GROUP)))
    n_passes = max(1, -(-n_rows // most))
    return max(ROW_BLOCK, -(-n_rows // (n_passes * ROW_BLOCK)) * ROW_BLOCK)


@compiled(nogil=True)
def place_rows(arguments: Any, workspace: Any, first: int, n_rows: int, n_all: int) -> None:
    """Describe n_rows rows of codes from `first` on, of n_all rows in the workspace. Whole blocks of rows precede."""
    arguments[N_ROWS] = n_rows
    entry, n_entries = first * arguments[N_GROUPS], n_all * arguments[N_GROUPS]
    at = workspace.ctypes.data
    arguments[CODES] = at + entry * GROUP
    at += n_entries * GROUP
    for name in (CODE_SCALES, OFFSETS_8, OFFSETS_128):
        arguments[name] = at + entry * 4
        at += n_entries * 4
    for name in (OFFSETS_32, OFFSETS_HALVES):
        arguments[name] = at + entry * 8
        at += n_entries * 8
    arguments[OFFSETS] = arguments[arguments[OFFSETS]]


@compiled(nogil=True)
def cut(arguments: Any, all_bytes: int, n_threads: int) -> int:
    """Cut the product that `arguments` describes into chunks, and return their number.

    Args:
        all_bytes: bytes of the weights that all threads share.
    """
    n_blocks, block_bytes, n_rows = arguments[N_BLOCKS], arguments[BLOCK_BYTES], arguments[N_ROWS]
    chunk_bytes = max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, all_bytes // (CHUNKS_PER_THREAD * n_threads)))
    rows = rows_per_pass(n_rows, arguments[N_GROUPS])
    n_passes = max(1, -(-n_rows // rows))
    blocks = chunk_bytes // (block_bytes * max(1, rows // ROW_BLOCK))
    blocks = max(blocks, n_blocks * n_passes // MAX_CHUNKS + 1)
    if n_blocks * block_bytes * n_rows < MIN_SHARED_BYTES:
        blocks = n_blocks
    arguments[BLOCKS_PER_CHUNK], arguments[ROWS_PER_PASS] = blocks, rows
    arguments[N_PARTS] = n_parts = (n_blocks + blocks - 1) // blocks
    return n_passes * n_parts


@compiled(nogil=True)
def _multiply(
    x: Any, workspace: Any, out: Any, arguments: Any, function: int, quantize: int, shared: int, n_threads: int
) -> None:
    """Quantize x into the workspace and multiply by the matrix that `arguments` describes."""
    n_rows = x.shape[0] * arguments[N_TERMS]
    arguments[INPUT], arguments[N_COLUMNS], arguments[OUTPUT] = x.ctypes.data, x.shape[1], out.ctypes.data
    place_rows(arguments, workspace, 0, n_rows, n_rows)
    n_quantize = (n_rows + ROW_BLOCK - 1) // ROW_BLOCK
    lead(shared if x.size >= MIN_SHARED_INPUTS else 0, quantize, arguments.ctypes.data, n_quantize)
    n_chunks = cut(arguments, arguments[N_BLOCKS] * arguments[BLOCK_BYTES], n_threads)
    lead(shared, function, arguments.ctypes.data, n_chunks)


class Matmul:
    """The matrix product, whose functions are compiled at first use. Threads may share it."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._functions: dict[TileKind, tuple[int, int]] = {}

    def __call__(self, x: Any, weight: TileMatrix) -> Any:
        """Return y, fp32 (m, N padded to 16), for contiguous fp32 x (m, K). Raises: ValueError: if x does not fit."""
        return self._run(x, weight, weight.fresh_arguments(), weight.n_blocks)

    def sliced(self, x: Any, weight: TileMatrix, ids: Any) -> Any:
        """Return only the outputs `ids`, fp32 (m, c), with the same bits as in the whole product.

        A tile's cache line holds 4 columns of 16 rows, so one weight row costs as much as its block of 16.

        Args:
            ids: int64 (c,).

        Raises:
            ValueError: if x or the ids do not fit, or an id has no row.
        """
        is_list = ids.ndim == 1 and ids.dtype == np.int64 and ids.size > 0
        if not is_list or ids.min() < 0 or ids.max() >= weight.n_blocks * 16:
            raise ValueError(f"Ids are {ids.dtype} {ids.shape}, expected int64 (c,) of 0..{weight.n_blocks * 16 - 1}.")
        blocks = ids >> 4
        arguments = weight.fresh_arguments()
        arguments[CHOSEN], arguments[N_BLOCKS] = blocks.ctypes.data, ids.size
        product = self._run(x, weight, arguments, ids.size)
        return product[:, np.arange(ids.size) * 16 + (ids & 15)]

    def rows(self, x: Any, weight: TileMatrix, first: int, n_rows: int) -> Any:
        """Return the outputs of n_rows weight rows from `first` on, padded to 16, bit for bit as in the whole product.

        Reads no other blocks of rows.

        Raises:
            ValueError: if x does not fit, `first` does not begin a block, or the rows are not all there.
        """
        block, rest = divmod(first, 16)
        n_blocks = -(-n_rows // 16)
        if rest or not 0 <= block < block + n_blocks <= weight.n_blocks:
            raise ValueError(f"Rows {first}..{first + n_rows - 1} are not of {weight.n_blocks} blocks of 16 rows.")
        arguments = weight.fresh_arguments()
        arguments[[TILES, SCALES]] += block * np.array(weight.block_bytes)
        arguments[N_BLOCKS] = n_blocks
        return self._run(x, weight, arguments, n_blocks)

    def _run(self, x: Any, weight: TileMatrix, arguments: Any, n_blocks: int) -> Any:
        x = whole_groups(x, weight.n_groups)
        out = np.empty((x.shape[0], n_blocks * 16), np.float32)
        workspace = np.empty(x.shape[0] * weight.n_terms * weight.n_groups * BYTES_PER_GROUP, np.uint8)
        functions = self.functions(weight.kind)
        shared = self._pool.enter()
        try:
            _multiply(x, workspace, out, arguments, *functions, shared, self._pool.n_threads)
        finally:
            self._pool.leave(shared)
        return out

    def functions(self, kind: TileKind) -> tuple[int, int]:
        """Return the addresses of the chunk functions for one kind of tile and for quantizing, compiled or loaded."""
        if kind not in self._functions:
            self._functions[kind] = _chunk_function(kind).address, QUANTIZE.address
        return self._functions[kind]
