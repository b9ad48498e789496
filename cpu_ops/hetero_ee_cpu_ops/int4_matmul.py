"""y[m, N] = x[m, K] W^T with W in int4 tiles and x quantized to int8 per row and group of 32.

Within group g of row t:  y[t, n] += 2^e s[n, g] a[t, g] (sum over k of u[n, k] q[t, k]  -  z sum over k of q[t, k])
where u is the entry moved into 0..255 (u = code, z = 8 for the linear codebook; u = entry + 128, z = 128 for any other),
s the weight's scale, q and a the activation's codes and scale. Every output is reduced group after group in one order,
whatever m is, so row t's bits do not depend on its batch.

Layout: docs/FORMAT.md. Source: derived; the instruction sequence is AVX-512 VNNI's, narrower ones by `simd`.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_ee_cpu_ops.simd import (
    F32,
    F32X16,
    I8,
    I32,
    I32X16,
    U8X64,
    broadcast4,
    call,
    dot4,
    f32x16,
    load,
    load_half16,
    lookup16,
    nibbles,
    prefetch,
    splat,
    store_rows,
    zeros,
)

TILE_BYTES, SCALE_BYTES, GROUP = 256, 32, 32
PREFETCH_BYTES = 4096  # how far ahead of use tiles are asked for


@intrinsic
def add_group(typing: Any, totals: Any, tile: Any, scales: Any, table: Any, x: Any, scale: Any, offset: Any, k: Any, g: Any) -> Any:
    """totals[t] += this group's share of 16 outputs for every row t.

    tile, scales, x, scale, offset: addresses of the group's tile, its 16 weight scales, row 0's 32 activation codes,
    activation scale and offset; k, g: bytes from a row's codes, and scales, to the next row's. table: address of the 16
    unsigned entries, or a literal none where a code is its own entry.
    """
    linear = isinstance(table, types.NoneType)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals_, tile_, scales_, table_, x_, scale_, offset_, k_, g_ = arguments
        operands = []
        if not linear:
            entries = load(builder, table_, U8X64)
        for line in range(4):
            low, high = nibbles(builder, load(builder, tile_, U8X64, 64 * line))
            if not linear:
                low, high = (lookup16(context, builder, entries, part) for part in (low, high))
            operands += [(low, 4 * line), (high, 16 + 4 * line)]
        weights = load_half16(context, builder, scales_)
        results = []
        for total in cgutils.unpack_tuple(builder, totals_, totals.count):
            sums = splat(builder, I32X16, load(builder, offset_, I32))
            for codes, column in operands:
                sums = dot4(context, builder, sums, codes, broadcast4(builder, x_, column), linear)
            factor = builder.fmul(weights, splat(builder, F32X16, load(builder, scale_, F32)))
            results.append(call(builder, "llvm.fma.v16f32", F32X16, [builder.sitofp(sums, F32X16), factor, total]))
            x_, scale_, offset_ = builder.add(x_, k_), builder.add(scale_, g_), builder.add(offset_, g_)
        return context.make_tuple(builder, signature.return_type, results)

    address = types.intp
    return totals(totals, address, address, table, address, address, address, address, address), codegen


@njit(nogil=True, cache=True)  # type: ignore[misc]
def row_blocks(
    rows: Any, first: int, end: int, tiles: int, scales: int, table: Any, x: int, x_scales: int, x_offsets: int, y: int,
    n_groups: int, n_padded: int,
) -> None:
    """Row blocks first..end-1 for len(rows) rows of x; every address is the start of its array."""
    k, g, n = n_groups * 32, n_groups * 4, n_padded * 4
    for block in range(first, end):
        tile, scale = tiles + block * n_groups * 256, scales + block * n_groups * 32
        codes, code_scale, offset = x, x_scales, x_offsets
        totals = zeros(rows)
        for _ in range(n_groups):
            prefetch(tile + 4096)
            prefetch(tile + 4160)
            prefetch(tile + 4224)
            prefetch(tile + 4288)
            totals = add_group(totals, tile, scale, table, codes, code_scale, offset, k, g)
            tile += 256
            scale += 32
            codes += 32
            code_scale += 4
            offset += 4
        store_rows(totals, y + block * 64, n)
