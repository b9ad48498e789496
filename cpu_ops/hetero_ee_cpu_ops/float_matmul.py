"""y[m, N] = 2^e x[m, K] W^T, W in int4 or int8 tiles, x in fp32 as it is: the exact-activation form of `matmul`.

For tests, and for layers whose quality needs it; one row of x at a time, so it costs m times as much as one.
Within a group: part[n] = sum over k of entry[n, k] x[k], column after column; then total[n] += s[n] part[n]. One order,
whatever m, threads or chunks. Source: derived.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from hetero_ee_cpu_ops.matmul import (
    BLOCKS_A_CHUNK,
    FACTOR,
    N_BLOCKS,
    N_GROUPS,
    N_ROWS,
    OUTPUT,
    SCALES,
    TABLE,
    TILES,
    TileMatrix,
)
from hetero_ee_cpu_ops.quantize import INPUT, whole_groups
from hetero_ee_cpu_ops.simd.bytes import (
    F32,
    F32X16,
    I8,
    I32X16,
    call,
    constant,
    f32x16,
    float_of_bits,
    load,
    load_half16,
    lookup16,
    nibbles,
    splat,
    store_rows,
    word,
    zeros,
)
from hetero_ee_cpu_ops.thread_pool import ThreadPool
from hetero_ee_cpu_ops.tile_group import BYTES, CODEBOOK

U8X64 = ir.VectorType(I8, 64)
BLOCKS_IN_A_CHUNK = 2


@intrinsic
def add_exact_group(typing: Any, kind: Any, total: Any, tile: Any, scales: Any, table: Any, x: Any) -> Any:
    """total (f32x16) plus the group's share for one row; addresses as in tile_group.add_group, x of 32 fp32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, total_, tile_, scales_, table_, x_ = arguments
        part = constant(F32X16, 0.0)
        for line, column in _signed_lines(context, builder, kind.count, tile_, table_):
            words = builder.bitcast(line, I32X16)
            for byte in range(4):  # sign-extend byte `byte` of each row's word
                up = builder.shl(words, constant(I32X16, 24 - 8 * byte))
                entry = builder.sitofp(builder.ashr(up, constant(I32X16, 24)), F32X16)
                value = splat(builder, F32X16, load(builder, x_, F32, 4 * (column + byte)))
                part = call(builder, "llvm.fma.v16f32", F32X16, [entry, value, part])
        return call(builder, "llvm.fma.v16f32", F32X16, [part, load_half16(context, builder, scales_), total_])

    address = types.intp
    return f32x16(kind, total, address, address, address, address), codegen


def _signed_lines(context: Any, builder: Any, kind: int, tile: Any, table: Any) -> list[tuple[Any, int]]:
    """The tile's lines of signed entries with each line's first column, in column order."""
    if kind == len(BYTES):
        return [(load(builder, tile, U8X64, 64 * line), 4 * line) for line in range(8)]
    found = []
    for line in range(4):
        for half, codes in enumerate(nibbles(builder, load(builder, tile, U8X64, 64 * line))):
            if kind == len(CODEBOOK):
                entries = lookup16(context, builder, load(builder, table, U8X64, 64), codes)
            else:
                entries = builder.sub(codes, constant(U8X64, 8))
            found.append((entries, 4 * line + 16 * half))
    return sorted(found, key=lambda item: item[1])


@njit(nogil=True, cache=True)
def _exact_block(kind: Any, block: int, row: int, arguments: int) -> None:
    """16 outputs of one row of x."""
    n_groups, tile_bytes = word(arguments, N_GROUPS), 256 if len(kind) < 3 else 512
    tile = word(arguments, TILES) + block * n_groups * tile_bytes
    scales = word(arguments, SCALES) + block * n_groups * 32
    x, table = word(arguments, INPUT) + row * n_groups * 128, word(arguments, TABLE)
    totals = zeros((0,))
    for group in range(n_groups):
        total = add_exact_group(kind, totals[0], tile + group * tile_bytes, scales + group * 32, table, x + group * 128)
        totals = (total,)
    n = word(arguments, N_BLOCKS) * 64
    store_rows(totals, float_of_bits(word(arguments, FACTOR)), word(arguments, OUTPUT) + row * n + block * 64, n)


@cache  # as matmul's
def _chunk_function(kind: Any) -> Any:
    @cfunc(types.void(types.intp, types.intp), cache=True)
    def chunk(arguments: int, index: int) -> None:
        first = index * word(arguments, BLOCKS_A_CHUNK)
        end = min(first + word(arguments, BLOCKS_A_CHUNK), word(arguments, N_BLOCKS))
        for block in range(first, end):
            for row in range(word(arguments, N_ROWS)):
                _exact_block(kind, block, row, arguments)

    return chunk


class FloatMatmul:
    """The operation; its compiled functions, one for each kind of tile, are made at first use."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __call__(self, x: Any, weight: TileMatrix) -> Any:
        """y (m, N padded to 16), fp32; x fp32 (m, K), K at most 32 G. Raises ValueError for other shapes or types."""
        x = whole_groups(x, weight.n_groups)
        output = np.empty((x.shape[0], weight.n_blocks * 16), np.float32)
        arguments = weight.fresh_arguments()
        arguments[INPUT], arguments[OUTPUT] = x.ctypes.data, output.ctypes.data
        arguments[N_ROWS], arguments[BLOCKS_A_CHUNK] = x.shape[0], BLOCKS_IN_A_CHUNK
        self._pool.run(_chunk_function(weight.kind).address, arguments, -(-weight.n_blocks // BLOCKS_IN_A_CHUNK))
        return output
