"""Rows of int4 weights times bytes: the innermost steps of the sparse FFN, as machine code.

The dot product of one unit (64 columns) of a row with activations, for several tokens: 16 lanes, lane l takes columns
4l .. 4l + 3. And the sum of rows, each times a weight of -127 .. 127 for each of its groups: four rows, a quad, are
interleaved byte by byte, so that both are the same step, four products of bytes for each of 16 sums.
All sums are exact integers, so every instruction set gives the same bits.

x86 multiplies unsigned by signed bytes: activations are moved up by 128, or entries by 32 before weights, and sums
begin at minus what that adds. On AVX2 two products are added in 16 bits: 2 x 255 x 32 and 2 x 64 x 127 fit.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

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
    f32x16,
    joined,
    load,
    lookup16,
    nibbles,
    parts,
    splat,
    target_has,
)
from hetero_ee_cpu_ops.simd.floats import MAGIC, Lanes, integers, operation, pointer
from hetero_ee_cpu_ops.tile_group import NARROW_LIMIT

SMALLEST = 1e-30  # below it 127 / the largest magnitude is no number; such weights count as zeros
WEIGHT_LIMIT = 127
MOST_UNITS = 2  # whose sums are in registers at once, on any target
QUAD_BYTES = 256  # of four rows' unpacked entries in a unit
COLUMNS = [16 * half + 4 * quarter + lane for quarter in range(4) for half in range(2) for lane in range(4)]
SIGNED_TABLE = 64  # bytes from the table's start to its entries as they are; before them, those moved up
I8X64 = ir.VectorType(I8, 64)


def _pick(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


# Dot products.


def _dot_256(context: Any, builder: Any, a: Any, b: Any, total: Any) -> Any:
    """8 sums."""
    if target_has(context, "avxvnni"):
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", total.type, [total, a, b])
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), [a, b])
    words = call(builder, "llvm.x86.avx2.pmadd.wd", total.type, [pairs, constant(pairs.type, 1)])
    return builder.add(words, total)


def _dot_neon(context: Any, builder: Any, a: Any, b: Any, total: Any) -> Any:
    """4 sums."""
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, [total, a, b])


def _dot_portable(builder: Any, a: Any, b: Any, total: Any) -> Any:
    wide = ir.VectorType(I16, a.type.count)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))  # four: at most 4 x 32 x 127 = 16,256
    for _ in range(2):
        lanes = list(range(0, products.type.count, 2))
        odd = [lane + 1 for lane in lanes]
        products = builder.add(_pick(builder, products, products, lanes), _pick(builder, products, products, odd))
    return builder.add(total, builder.sext(products, total.type))


def _dot(context: Any, builder: Any, a: Any, b: Any, total: Any) -> Any:
    """total plus the 16 int32 sums of four products each of 64 bytes; x86 takes `a` as unsigned."""
    if target_has(context, "avx512vnni"):
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, [total, a, b])
    dot, n = (_dot_256, 2) if target_has(context, "avx2") else (_dot_neon, 4)
    if n == 4 and not target_has(context, "dotprod"):
        return _dot_portable(builder, a, b, total)
    pieces = zip(*(parts(builder, value, n) for value in (a, b, total)), strict=True)
    return joined(builder, [dot(context, builder, *piece) for piece in pieces])


@intrinsic
def move_up(typing: Any, x: Any) -> Any:
    """A unit's 64 activation codes at x as add_unit reads them: moved up by 128 where products take one unsigned."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if target_has(context, "avx2"):
            moved = builder.xor(load(builder, arguments[0], I8X64), constant(I8X64, -128))
            builder.store(moved, pointer(builder, arguments[0], I8X64)).align = 1
        return context.get_dummy_value()

    return types.void(types.intp), codegen


def _two_factors(context: Any, builder: Any, address: Any, offset: int) -> Any:
    """Two fp32 from memory, 8 lanes each."""
    if target_has(context, "avx512f"):
        both = load(builder, address, ir.VectorType(F32, 2), offset)
        return _pick(builder, both, both, [0] * 8 + [1] * 8)
    eight = ir.VectorType(F32, 8)
    return joined(builder, [splat(builder, eight, load(builder, address, F32, offset + 4 * at)) for at in range(2)])


@intrinsic
def add_unit(typing: Any, totals: Any, codes: Any, table: Any, x: Any, stride: Any, factors: Any) -> Any:
    """totals[t] (f32x16) plus one unit's 16 sums times its groups' factors, for every token t.

    codes: address of the unit's 32 bytes; table: RowMatrix's; x: address of token 0's 64 codes after move_up, the next
    token's `stride` bytes on; factors: address of token 0's two fp32, the next token's 64 on.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals_, codes_, table_, x_, stride_, factors_ = arguments
        table_entries = load(builder, table_, ir.VectorType(I8, 32), SIGNED_TABLE)
        codes_of = nibbles(builder, load(builder, codes_, table_entries.type))
        entries = joined(builder, [lookup16(context, builder, table_entries, half) for half in codes_of])
        start = constant(I32X16, 0)
        if target_has(context, "avx2"):
            start = builder.neg(_dot(context, builder, constant(I8X64, -128), entries, start))
        results = []
        for row, total in enumerate(cgutils.unpack_tuple(builder, totals_, totals.count)):
            sums = _dot(context, builder, load(builder, x_, I8X64), entries, start)
            factor = _two_factors(context, builder, factors_, 64 * row)
            operands = [builder.sitofp(sums, F32X16), factor, total]
            results.append(call(builder, "llvm.fma.v16f32", F32X16, operands))
            x_ = builder.add(x_, stride_)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, *([types.intp] * 5)), codegen


# Sums of weighted rows.


@intrinsic
def widest_strip(typing: Any) -> Any:
    """A tuple as long as the sums of as many units as registers hold at once: four a unit."""
    n_units = MOST_UNITS if target_has(cpu_target.target_context, "avx512f") else 1
    kind = types.UniTuple(types.int64, 4 * n_units)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant_null(kind)

    return kind(), codegen


def _zipped(builder: Any, first: Any, second: Any) -> list[Any]:
    """The lower and the upper halves of each 16 bytes of both, their elements in turn: what x86 and Arm have for it."""
    count, half = first.type.count, 64 // first.type.element.width
    halves = []
    for begin in (0, half):
        lanes = [at + n for at in range(begin, count, 2 * half) for lane in range(half) for n in (lane, count + lane)]
        halves.append(_pick(builder, first, second, lanes))
    return halves


def _quad(context: Any, builder: Any, lines: Any, offset: Any, table: Any) -> list[Any]:
    """Four rows' entries in a unit, of a column its four rows side by side, 16 columns each as COLUMNS has them."""
    kind, words = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    rows = [load(builder, builder.add(load(builder, lines, I64, 8 * row), offset), kind) for row in range(4)]
    pairs = [[builder.bitcast(half, words) for half in _zipped(builder, *rows[at : at + 2])] for at in (0, 2)]
    quarters = [builder.bitcast(part, kind) for both in zip(*pairs, strict=True) for part in _zipped(builder, *both)]
    entries = load(builder, table, I8X64, 0 if target_has(context, "avx2") else SIGNED_TABLE)
    found: list[list[Any]] = [[], []]
    for at in (0, 2):
        for nibble, codes in enumerate(nibbles(builder, joined(builder, quarters[at : at + 2]))):
            found[nibble].append(lookup16(context, builder, entries, codes))
    return found[0] + found[1]


def _each_group(builder: Any, address: Any, n_sums: int) -> list[Any]:
    """For each of n sums of 16 columns the word of its group of 32."""
    words = [splat(builder, I32X16, load(builder, address, I32, 4 * group)) for group in range(n_sums // 2)]
    return [words[at // 2] for at in range(n_sums)]


def _weighted(context: Any, builder: Any, sums: Any, entries: list[Any], weights: Any) -> list[Any]:
    """The tuple of sums plus a quad's entries times its weights."""
    results, words = [], _each_group(builder, weights, len(entries))
    for total, entry, word in zip(cgutils.unpack_tuple(builder, sums), entries, words, strict=True):
        total = _dot(context, builder, entry, builder.bitcast(word, I8X64), builder.bitcast(total, I32X16))
        results.append(builder.bitcast(total, F32X16))
    return results


@intrinsic
def start_sums(typing: Any, cells: Any, offsets: Any) -> Any:
    """Sums of no rows in some units, for each of len(cells) 16 columns' int32, carried as f32x16.

    offsets: address of a word for each of the units' groups.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = [constant(I32X16, 0)] * cells.count
        if target_has(context, "avx2"):
            words = _each_group(builder, arguments[1], cells.count)
        sums = [builder.bitcast(value, F32X16) for value in words]
        return context.make_tuple(builder, signature.return_type, sums)

    return types.UniTuple(f32x16, cells.count)(cells, types.intp), codegen


@intrinsic
def add_quad(typing: Any, sums: Any, lines: Any, here: Any, table: Any, weights: Any) -> Any:
    """Sums plus four rows' entries times their weights in the units of the sums.

    lines: address of the rows' addresses; here: the first unit's bytes in a row; weights: address of 4 bytes, a row
    each, for each of the units' groups.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, lines_, here_, table_, weights_ = arguments
        entries = []
        for unit in range(sums.count // 4):
            entries += _quad(context, builder, lines_, builder.add(here_, ir.Constant(I64, 32 * unit)), table_)
        return context.make_tuple(builder, signature.return_type, _weighted(context, builder, sums_, entries, weights_))

    return sums(sums, *([types.intp] * 4)), codegen


@intrinsic
def unpack_quad(typing: Any, cells: Any, lines: Any, here: Any, table: Any, buffer: Any) -> Any:
    """Four rows' entries in len(cells) / 4 units at `buffer`, QUAD_BYTES a unit, for add_unpacked_quad."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, lines_, here_, table_, buffer_ = arguments
        for unit in range(cells.count // 4):
            for value in _quad(context, builder, lines_, builder.add(here_, ir.Constant(I64, 32 * unit)), table_):
                builder.store(value, pointer(builder, buffer_, value.type)).align = 1
                buffer_ = builder.add(buffer_, ir.Constant(I64, 64))
        return context.get_dummy_value()

    return types.void(cells, *([types.intp] * 4)), codegen


@intrinsic
def add_unpacked_quad(typing: Any, sums: Any, buffer: Any, weights: Any) -> Any:
    """The same as add_quad, of what unpack_quad left at `buffer`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, buffer_, weights_ = arguments
        entries = [load(builder, buffer_, I8X64, 64 * number) for number in range(sums.count)]
        return context.make_tuple(builder, signature.return_type, _weighted(context, builder, sums_, entries, weights_))

    return sums(sums, types.intp, types.intp), codegen


@intrinsic
def finish_sums(typing: Any, sums: Any, factors: Any, out: Any) -> Any:
    """out[column] += sum x factor, the units' fp32 at `out`, one factor for each of their groups at `factors`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, factors_, out_ = arguments
        values = cgutils.unpack_tuple(builder, sums_)
        for at in range(sums.count):
            first, second = values[at & -2 : (at & -2) + 2]
            value = _pick(builder, first, second, [COLUMNS.index(16 * (at % 2) + column) for column in range(16)])
            factor = splat(builder, F32X16, load(builder, factors_, F32, at // 2 * 4))
            value = builder.sitofp(builder.bitcast(value, I32X16), F32X16)
            total = call(builder, "llvm.fma.v16f32", F32X16, [value, factor, load(builder, out_, F32X16, 64 * at)])
            target = builder.add(out_, ir.Constant(I64, 64 * at))
            builder.store(total, pointer(builder, target, F32X16)).align = 4
        return context.get_dummy_value()

    return types.void(sums, types.intp, types.intp), codegen


# Weights of a block of rows, for 16 groups at a time.


def _larger(a: Lanes, b: Lanes) -> Lanes:
    """The larger of a and |b|, by their bits, so that NaN is the largest; a is not negative."""
    bits = b.magnitude().bits()
    kept = a.builder.select(a.builder.icmp_signed(">", a.bits(), bits), a.bits(), bits)
    return Lanes(a.context, a.builder, a.builder.bitcast(kept, F32X16))


larger = operation(2, _larger, "larger", "The larger of a and |b|, NaN before everything; a >= 0.")
steps_a_unit = operation(
    1,
    lambda m: m.where("<", SMALLEST, 0.0, m.constant(WEIGHT_LIMIT) / m),
    "steps_a_unit",
    "127 / m, 0 where m is tiny.",
)
step_size = operation(
    1, lambda m: m.where("<", SMALLEST, 0.0, m / float(WEIGHT_LIMIT)), "step_size", "m / 127, 0 where m is tiny."
)


@intrinsic
def weigh_quad(typing: Any, values: Any, steps: Any, total: Any, address: Any) -> Any:
    """The weights rint(value x steps) of four rows in 16 groups, 4 bytes a group at `address` as add_quad reads them.

    values: four f32x16; steps: f32x16. Returns total, carried as f32x16, with the weights added to its low 16 bits.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        steps_, total_, word = Lanes(context, builder, arguments[1]), builder.bitcast(arguments[2], I32X16), None
        for row, value in enumerate(cgutils.unpack_tuple(builder, arguments[0])):
            bits = (Lanes(context, builder, value) * steps_ + MAGIC).bits()  # its low 16 are the weight's, 0 of a NaN
            total_ = builder.add(total_, bits)
            byte = builder.shl(builder.and_(bits, integers(255)), integers(8 * row))
            word = byte if word is None else builder.or_(word, byte)
        builder.store(word, pointer(builder, arguments[3], I32X16)).align = 4
        return builder.bitcast(total_, F32X16)

    return f32x16(values, f32x16, f32x16, types.intp), codegen


@intrinsic
def store_offsets(typing: Any, total: Any, address: Any) -> Any:
    """What the sums of these weights begin with where entries are moved up: -32 times weigh_quad's total."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        low = builder.shl(builder.bitcast(arguments[0], I32X16), integers(16))
        offsets = builder.mul(builder.ashr(low, integers(16)), integers(-NARROW_LIMIT))
        builder.store(offsets, pointer(builder, arguments[1], I32X16)).align = 4
        return context.get_dummy_value()

    return types.void(f32x16, types.intp), codegen
