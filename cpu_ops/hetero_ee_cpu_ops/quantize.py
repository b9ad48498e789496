"""Quantize activations to int8: for each row and group of 32 columns, a = max|x| / 127, q = round(x / a), ties to even.

With two terms, what is left, x / a - q, is exact in fp32 and is rounded again, in units of 1 / 254: x is close to
a (q + r / 254), 16 bits in two rows of int8 codes with scales a and a / 254.

A row's codes depend only on that row. A group of zeros has scale 0; a NaN or Inf makes its group's scale NaN or Inf,
and so every output of the row NaN. Each group also stores -8 sum(q) and -128 sum(q), which matmuls add because their
instructions need unsigned weights. For AVX2, which adds 8 products in 16 bits, it also stores -32 times the sums of
these codes: columns 0, 1, 4 and 5; 2, 3, 6 and 7; the same 8 further on; each with the four columns 16 further on. For
6-bit weights, whose scales belong to 16 columns, it stores -32 times the sums of both halves.
Source: derived; the groups are those of the weights' scales.

Layout: rows in blocks of 8 (r rows in the last, which may be shorter), within a block group by group, the group's r
rows side by side: codes (G, r, 32), scales and offsets (G, r), AVX2's four (G, r, 4), halves (G, r, 2). So a matmul of
8 rows reads one stream; whole rows, a power of two apart, would compete for one set of the L1 cache.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.simd.bytes import F32, F32X16, I8, I16, I32, I32X16, call, constant, load, splat, word
from hetero_ee_cpu_ops.tile_kind import NARROW_LIMIT, adds_in_16_bits

GROUP = 32
ROW_BLOCK = 8  # rows of the widest step of the matmul
TERM_RATIO = 254.0  # of the first term's unit to the second's, whose codes then are within +-127, too
SMALLEST = 1e-30  # below it 127 / max|x| overflows; such a group counts as zeros
BYTES_PER_GROUP = 60  # of workspace: 32 codes, a scale, two offsets, AVX2's four, the halves' two
# Indices in the argument array, after the matmul's own.
INPUT, N_COLUMNS, CODES, CODE_SCALES, OFFSETS_8, OFFSETS_128, OFFSETS_32, OFFSETS_HALVES = range(12, 20)


@intrinsic
def quantize_group(
    typing: Any,
    terms: Any,
    x: Any,
    codes: Any,
    scale: Any,
    offset_8: Any,
    offset_128: Any,
    offsets_32: Any,
    offsets_halves: Any,
) -> Any:
    """Quantize 32 fp32 at `x` to 32 int8 at `codes`. Store the fp32 scale and the offsets at their addresses.

    With len(terms) = 2, the second term's codes, scale and offsets follow the first one's.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, x_, *targets = arguments
        halves = [load(builder, x_, F32X16, offset) for offset in (0, 64)]
        signs = constant(I32X16, 0x7FFFFFFF)
        sizes = [builder.and_(builder.bitcast(half, I32X16), signs) for half in halves]  # as integers, NaN before all
        larger = builder.select(builder.icmp_signed(">", *sizes), *sizes)
        largest = builder.bitcast(call(builder, "llvm.vector.reduce.smax.v16i32", I32, [larger]), F32)
        tiny = builder.fcmp_ordered("<", largest, ir.Constant(F32, SMALLEST))
        zero = ir.Constant(F32, 0.0)
        inverse = builder.select(tiny, zero, builder.fdiv(ir.Constant(F32, 127.0), largest))
        scaled = [builder.fmul(half, splat(builder, F32X16, inverse)) for half in halves]
        unit = builder.select(tiny, zero, builder.fdiv(largest, ir.Constant(F32, 127.0)))
        for term in range(terms.count):
            rounded = [call(builder, "llvm.rint.v16f32", F32X16, [half]) for half in scaled]
            _store_term(context, builder, rounded, unit, targets, term)
            rest = [builder.fsub(*pair) for pair in zip(scaled, rounded, strict=True)]
            scaled = [builder.fmul(half, constant(F32X16, TERM_RATIO)) for half in rest]
            unit = builder.fdiv(unit, ir.Constant(F32, TERM_RATIO))
        return context.get_dummy_value()

    return types.void(terms, *([types.intp] * 7)), codegen


def _store_term(context: Any, builder: Any, rounded: list[Any], scale: Any, targets: Any, term: int) -> None:
    """Store a term's codes, which are whole numbers or NaN, with its scale and offsets."""
    codes_at, scale_at, offset_8_at, offset_128_at, offsets_32_at, offsets_halves_at = targets
    halves, sums = [], []
    for index, half in enumerate(rounded):
        is_number = builder.fcmp_ordered("ord", half, half)  # if so, it is within +-127
        whole = builder.fptosi(builder.select(is_number, half, constant(F32X16, 0.0)), I32X16)
        halves.append(whole)
        sums.append(call(builder, "llvm.vector.reduce.add.v16i32", I32, [whole]))
        _store(builder, builder.trunc(whole, ir.VectorType(I8, 16)), codes_at, GROUP * term + 16 * index)
        _store(builder, builder.mul(sums[-1], ir.Constant(I32, -32)), offsets_halves_at, 8 * term + 4 * index)
    summed = builder.add(*sums)
    _store(builder, scale, scale_at, 4 * term)
    _store(builder, builder.mul(summed, ir.Constant(I32, -8)), offset_8_at, 4 * term)
    _store(builder, builder.mul(summed, ir.Constant(I32, -128)), offset_128_at, 4 * term)
    if adds_in_16_bits(context):
        _store(builder, _offsets_32(builder, builder.add(*halves)), offsets_32_at, 8 * term)


def _offsets_32(builder: Any, total: Any) -> Any:
    """Add columns k and k + 16 of int32 (16,) and return int16 (4,): -32 times four sums of at most 8 x 127 each."""

    def chosen(lanes: list[int]) -> Any:
        return builder.shuffle_vector(total, total, ir.Constant(ir.VectorType(I32, 4), lanes))

    parts = [chosen([first, first + 2, first + 8, first + 10]) for first in (0, 1, 4, 5)]
    sums = builder.add(builder.add(parts[0], parts[1]), builder.add(parts[2], parts[3]))
    return builder.trunc(builder.mul(sums, constant(sums.type, -NARROW_LIMIT)), ir.VectorType(I16, 4))


def _store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    target = builder.add(address, ir.Constant(address.type, offset))
    builder.store(value, builder.inttoptr(target, value.type.as_pointer())).align = 1


@inner
def quantize_row_block(terms: Any, arguments: int, index: int, n_rows: int, n_groups: int, sources: int) -> None:
    """Write rows 8 * index .. 8 * index + 7 of codes. Each row of x, whose columns are whole groups, has len(terms).

    sources: address of a list of rows of x, which are quantized in its order; 0 for all rows in order.
    """
    top = index * ROW_BLOCK
    r = min(ROW_BLOCK, n_rows - top)
    for row in range(0, r, len(terms)):
        source = (top + row) // len(terms)
        if sources:
            source = word(sources, source)
        x = word(arguments, INPUT) + source * word(arguments, N_COLUMNS) * 4
        entry = top * n_groups + row
        for _ in range(n_groups):
            quantize_group(
                terms,
                x,
                word(arguments, CODES) + entry * GROUP,
                word(arguments, CODE_SCALES) + entry * 4,
                word(arguments, OFFSETS_8) + entry * 4,
                word(arguments, OFFSETS_128) + entry * 4,
                word(arguments, OFFSETS_32) + entry * 8,
                word(arguments, OFFSETS_HALVES) + entry * 8,
            )
            x += GROUP * 4
            entry += r


def whole_groups(x: Any, n_groups: int) -> Any:
    """Pad contiguous fp32 x (m, K) with zero columns to n_groups groups. Raises: ValueError: if x does not fit."""
    if x.ndim != 2 or x.dtype != np.float32 or not x.flags.c_contiguous or -(-x.shape[1] // GROUP) != n_groups:
        raise ValueError(
            f"Activations are {x.dtype} {x.shape}, expected contiguous float32 (m, K), K in {n_groups} groups of 32."
        )
    if x.shape[1] % GROUP == 0:
        return x
    padded = np.zeros((x.shape[0], n_groups * GROUP), np.float32)
    padded[:, : x.shape[1]] = x
    return padded
