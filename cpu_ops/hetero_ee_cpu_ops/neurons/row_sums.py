"""Sums of int4 rows (rows.py), each multiplied by an int8 weight per group of columns, as LLVM code.

Four rows, a quad, are interleaved byte by byte, so that dot products of four bytes give 16 columns' sums. A unit of 64
columns has four vectors of sums, in the column order of COLUMNS; in_order restores the natural order.
All sums are exact integers, so every instruction set gives the same bits.

x86 multiplies unsigned by signed bytes: a bias is added to the entries, and its share is subtracted at the end. On AVX2
two products are added in 16 bits: 2 x 64 x 127 fits.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from hetero_ee_cpu_ops.neurons.row_unit import pick, zipped
from hetero_ee_cpu_ops.simd.bytes import (
    F32,
    F32X16,
    I8,
    I16,
    I32,
    I32X16,
    I64,
    call,
    constant,
    entries16,
    f32x16,
    joined,
    load,
    parts,
    splat,
    target_has,
)
from hetero_ee_cpu_ops.simd.floats import MAGIC, Lanes, integers, operation, pointer
from hetero_ee_cpu_ops.tile_kind import byte_bias

SMALLEST = 1e-30  # below it 127 / the largest magnitude overflows; such weights count as zeros
WEIGHT_LIMIT = 127
COLUMNS = [16 * half + 4 * quarter + lane for quarter in range(4) for half in range(2) for lane in range(4)]
SIGNED_TABLE = 64  # byte offset in the table of the entries without bias; those with bias come first
I8X64 = ir.VectorType(I8, 64)


def _dot_256(context: Any, builder: Any, a: Any, b: Any, total: Any) -> Any:
    if target_has(context, "avxvnni"):
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", total.type, [total, a, b])
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), [a, b])
    words = call(builder, "llvm.x86.avx2.pmadd.wd", total.type, [pairs, constant(pairs.type, 1)])
    return builder.add(words, total)


def _dot_neon(context: Any, builder: Any, a: Any, b: Any, total: Any) -> Any:
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, [total, a, b])


def _dot_portable(builder: Any, a: Any, b: Any, total: Any) -> Any:
    wide = ir.VectorType(I16, a.type.count)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))  # four: at most 4 x 32 x 127 = 16,256
    for _ in range(2):
        lanes = list(range(0, products.type.count, 2))
        odd = [lane + 1 for lane in lanes]
        products = builder.add(pick(builder, products, products, lanes), pick(builder, products, products, odd))
    return builder.add(total, builder.sext(products, total.type))


def _dot(context: Any, builder: Any, a: Any, b: Any, total: Any) -> Any:
    """Return total plus 16 int32 sums of four byte products each, from 64 bytes. On x86 `a` is unsigned."""
    if target_has(context, "avx512vnni"):
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, [total, a, b])
    dot, n = (_dot_256, 2) if target_has(context, "avx2") else (_dot_neon, 4)
    if n == 4 and not target_has(context, "dotprod"):
        return _dot_portable(builder, a, b, total)
    pieces = zip(*(parts(builder, value, n) for value in (a, b, total)), strict=True)
    return joined(builder, [dot(context, builder, *piece) for piece in pieces])


@intrinsic
def has_many_registers(typing: Any) -> Any:
    """Return whether a quad fits in registers along with two units' sums of a token, or one unit's of four."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(target_has(cpu_target.target_context, "avx512f")))

    return types.boolean(), codegen


def _quad(context: Any, builder: Any, lines: Any, here: Any, table: Any) -> list[Any]:
    """Load four rows' entries in a unit, 16 columns per vector, so that a column's four entries are adjacent."""
    kind, words = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    rows = [load(builder, builder.add(load(builder, lines, I64, 8 * row), here), kind) for row in range(4)]
    pairs = [[builder.bitcast(half, words) for half in zipped(builder, *rows[at : at + 2])] for at in (0, 2)]
    quarters = [builder.bitcast(part, kind) for both in zip(*pairs, strict=True) for part in zipped(builder, *both)]
    entries = load(builder, table, I8X64, 0 if target_has(context, "avx2") else SIGNED_TABLE)
    found: list[list[Any]] = [[], []]
    for at in (0, 2):
        for nibble, part in enumerate(entries16(context, builder, entries, joined(builder, quarters[at : at + 2]))):
            found[nibble].append(part)
    return found[0] + found[1]


@intrinsic
def add_quad(typing: Any, sums: Any, tokens: Any, lines: Any, here: Any, table: Any, weights: Any, stride: Any) -> Any:
    """Add four rows' entries times their weights to int32 sums, which are carried as f32x16.

    sums holds, token by token, four vectors for each of one or more consecutive units; len(tokens) tokens.

    Args:
        lines: address of the rows' addresses.
        here: byte offset in a row of the first unit.
        table: RowMatrix's table.
        weights: address of token 0's weights, 4 bytes (one per row) for each of the units' groups.
        stride: bytes to the next token's weights.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, _, lines_, here_, table_, weights_, stride_ = arguments
        entries = []
        for unit in range(sums.count // (4 * tokens.count)):
            entries += _quad(context, builder, lines_, builder.add(here_, ir.Constant(I64, 32 * unit)), table_)
        totals = [builder.bitcast(value, I32X16) for value in cgutils.unpack_tuple(builder, sums_)]
        for at, total in enumerate(totals):
            number = at % len(entries)
            if at and number == 0:
                weights_ = builder.add(weights_, stride_)
            word = splat(builder, I32X16, load(builder, weights_, I32, number // 2 * 4))
            total = _dot(context, builder, entries[number], builder.bitcast(word, I8X64), total)
            totals[at] = builder.bitcast(total, F32X16)
        return context.make_tuple(builder, signature.return_type, totals)

    return sums(sums, tokens, *([types.intp] * 5)), codegen


@intrinsic
def finish_sums(typing: Any, sums: Any, tokens: Any, offsets: Any, factors: Any, out: Any, stride: Any) -> Any:
    """Add (sum + offset) x factor to the fp32 sums at `out`, `stride` bytes apart from token to token.

    offsets, factors: int32 and fp32 for each of the units' groups, 64 bytes apart from token to token.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, _, offsets_, factors_, out_, stride_ = arguments
        for number, value in enumerate(cgutils.unpack_tuple(builder, sums_)):
            token, at = divmod(number, sums.count // tokens.count)
            if number and at == 0:
                out_ = builder.add(out_, stride_)
            group = 64 * token + at // 2 * 4
            offset = splat(builder, I32X16, load(builder, offsets_, I32, group))
            factor = splat(builder, F32X16, load(builder, factors_, F32, group))
            value = builder.sitofp(builder.add(builder.bitcast(value, I32X16), offset), F32X16)
            total = call(builder, "llvm.fma.v16f32", F32X16, [value, factor, load(builder, out_, F32X16, 64 * at)])
            target = builder.add(out_, ir.Constant(I64, 64 * at))
            builder.store(total, pointer(builder, target, F32X16)).align = 4
        return context.get_dummy_value()

    return types.void(sums, tokens, *([types.intp] * 4)), codegen


@intrinsic
def add_sums(typing: Any, totals: Any, address: Any) -> Any:
    """Add the four fp32 vectors at `address` to the four vectors of a unit's sums."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = enumerate(cgutils.unpack_tuple(builder, arguments[0]))
        results = [builder.fadd(value, load(builder, arguments[1], F32X16, 64 * at)) for at, value in values]
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, types.intp), codegen


@intrinsic
def in_order(typing: Any, sums: Any) -> Any:
    """Return a unit's four vectors of sums with the columns in natural order."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, results = cgutils.unpack_tuple(builder, arguments[0]), []
        for at in range(4):
            lanes = [COLUMNS.index(16 * (at % 2) + column) for column in range(16)]
            results.append(pick(builder, values[at & -2], values[at | 1], lanes))
        return context.make_tuple(builder, signature.return_type, results)

    return sums(sums), codegen


# Weights of a block of rows, for 16 groups at a time


steps_per_unit = operation(
    1,
    lambda m: m.where("<", SMALLEST, 0.0, m.constant(WEIGHT_LIMIT) / m),
    "steps_per_unit",
    "127 / m, or 0 if m is tiny.",
)
step_size = operation(
    1, lambda m: m.where("<", SMALLEST, 0.0, m / float(WEIGHT_LIMIT)), "step_size", "m / 127, or 0 if m is tiny."
)


def _products(context: Any, builder: Any, scales: Any, hidden: Any) -> list[Lanes]:
    """Multiply 16 scales (fp32, 64 bytes) of each of four rows by the row's fp32 value at `hidden`."""
    found = []
    for row in range(4):
        h = splat(builder, F32X16, load(builder, hidden, F32, 4 * row))
        found.append(Lanes(context, builder, builder.fmul(load(builder, scales, F32X16, 64 * row), h)))
    return found


@intrinsic
def largest_of_quad(typing: Any, largest: Any, scales: Any, hidden: Any) -> Any:
    """Return the maximum of `largest` (not negative) and |scale x hidden| of four rows; NaN counts as the largest."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], I32X16)
        for product in _products(context, builder, *arguments[1:]):
            other = product.magnitude().bits()
            bits = builder.select(builder.icmp_signed(">", bits, other), bits, other)
        return builder.bitcast(bits, F32X16)

    return f32x16(f32x16, types.intp, types.intp), codegen


@intrinsic
def weigh_quad(typing: Any, total: Any, steps: Any, scales: Any, hidden: Any, out: Any) -> Any:
    """Compute the int8 weights rint(scale x hidden x steps) of four rows in 16 groups.

    Stores 4 bytes per group at `out`, as add_quad reads them. Returns total, int32 carried as f32x16, plus the weights.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total_, steps_, scales_, hidden_, out_ = arguments
        word = None
        for row, product in enumerate(_products(context, builder, scales_, hidden_)):
            bits = (product * Lanes(context, builder, steps_) + MAGIC).bits()  # its low byte is the weight, 0 for NaN
            byte = builder.and_(builder.shl(bits, integers(8 * row)), integers(255 << 8 * row))
            word = byte if word is None else builder.or_(word, byte)
        builder.store(word, pointer(builder, out_, I32X16)).align = 4
        ones, total_ = constant(I8X64, 1), builder.bitcast(total_, I32X16)
        return builder.bitcast(_dot(context, builder, ones, builder.bitcast(word, I8X64), total_), F32X16)

    return f32x16(f32x16, f32x16, types.intp, types.intp, types.intp), codegen


@intrinsic
def store_offsets(typing: Any, total: Any, address: Any) -> Any:
    """Store the offset that removes the entries' bias from the sums: -bias times the sum of the weights, or 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        up = byte_bias(context) if target_has(context, "avx2") else 0
        offsets = builder.mul(builder.bitcast(arguments[0], I32X16), integers(-up))
        builder.store(offsets, pointer(builder, arguments[1], I32X16)).align = 4
        return context.get_dummy_value()

    return types.void(f32x16, types.intp), codegen
