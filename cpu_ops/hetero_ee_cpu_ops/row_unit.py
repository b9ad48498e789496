"""Rows of int4 weights times bytes: the innermost steps of the sparse FFN, as machine code.

The dot product of one unit (64 columns) of a row with activations, for several tokens: 16 lanes, lane l takes columns
4l .. 4l + 3. And the sum of pairs of rows, each times a weight of -127 .. 127 for each of its groups: entries of up to
32 and four pairs stay within 8 x 32 x 127 = 32,512, so that 16 bits hold what they add up to.
All sums are exact integers, so every instruction set gives the same bits.

x86 multiplies unsigned by signed bytes: entries are moved up by 32, and -32 times the sum of what they are multiplied
by is where sums begin. Pairs of rows are interleaved byte by byte; what wraps around in 16 bits on the way comes back.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
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
PAIRS_A_SUM = 4  # of rows, which 16 bits hold
PAIR_BYTES = 256  # of two rows' unpacked entries in 128 columns
UNIT_INPUT_BYTES = 128  # of activations: 64 codes, 16 words
SIGNED_TABLE = 64  # bytes from the table's start to its entries as they are; before them, those moved up
I8X64, I16X32 = ir.VectorType(I8, 64), ir.VectorType(I16, 32)


def _pick(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


# Dot products.


def _dot_512(context: Any, builder: Any, entries: Any, x: Any, offsets: Any) -> Any:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, [offsets, entries, x])


def _dot_256(context: Any, builder: Any, entries: Any, x: Any, offsets: Any) -> Any:
    """Of 32 columns: 8 sums."""
    if target_has(context, "avxvnni"):
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", offsets.type, [offsets, entries, x])
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), [entries, x])
    words = call(builder, "llvm.x86.avx2.pmadd.wd", offsets.type, [pairs, constant(pairs.type, 1)])
    return builder.add(words, offsets)


def _dot_neon(context: Any, builder: Any, entries: Any, x: Any) -> Any:
    """Of 16 columns: 4 sums."""
    words = ir.VectorType(I32, 4)
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", words, [constant(words, 0), entries, x])


def _dot_portable(context: Any, builder: Any, entries: Any, x: Any) -> Any:
    wide = ir.VectorType(I16, entries.type.count)
    products = builder.mul(builder.sext(entries, wide), builder.sext(x, wide))  # four: at most 4 x 32 x 127 = 16,256
    for _ in range(2):
        lanes = list(range(0, products.type.count, 2))
        odd = [lane + 1 for lane in lanes]
        products = builder.add(_pick(builder, products, products, lanes), _pick(builder, products, products, odd))
    return builder.sext(products, ir.VectorType(I32, products.type.count))


def _dot(context: Any, builder: Any, entries: list[Any], x: Any) -> Any:
    """The 16 int32 sums of four products each; entries: of columns 0..31 and 32..63; x: as in add_unit."""
    codes = load(builder, x, I8X64)
    if not target_has(context, "avx2"):
        both = joined(builder, entries)
        if not target_has(context, "dotprod"):
            return _dot_portable(context, builder, both, codes)
        quarters = zip(parts(builder, both, 4), parts(builder, codes, 4), strict=True)
        return joined(builder, [_dot_neon(context, builder, *quarter) for quarter in quarters])
    offsets = load(builder, x, I32X16, 64)
    if target_has(context, "avx512vnni"):
        return _dot_512(context, builder, joined(builder, entries), codes, offsets)
    halves = zip(entries, parts(builder, codes, 2), parts(builder, offsets, 2), strict=True)
    return joined(builder, [_dot_256(context, builder, *half) for half in halves])


@intrinsic
def offset_unit(typing: Any, x: Any) -> Any:
    """After a unit's 64 activation codes at x, what its 16 sums begin with where entries are moved up by 32: int32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if target_has(context, "avx2"):
            offsets = []
            for codes in parts(builder, load(builder, arguments[0], I8X64), 2):
                limits = constant(codes.type, NARROW_LIMIT)
                pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), [limits, codes])
                minus = constant(pairs.type, -1)
                offsets.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [pairs, minus]))
            at = builder.add(arguments[0], ir.Constant(I64, 64))
            builder.store(joined(builder, offsets), pointer(builder, at, I32X16)).align = 4
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def add_unit(typing: Any, totals: Any, codes: Any, table: Any, x: Any, stride: Any, factors: Any) -> Any:
    """totals[t] (f32x16) plus one unit's 16 sums times its groups' factors, for every token t.

    codes: address of the unit's 32 bytes; table: RowMatrix's; x: address of token 0's 64 codes with offset_unit's words
    after them, the next token's `stride` bytes on; factors: address of token 0's two fp32, the next token's 64 on.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals_, codes_, table_, x_, stride_, factors_ = arguments
        signed = 0 if target_has(context, "avx2") else SIGNED_TABLE
        entries = load(builder, table_, ir.VectorType(I8, 32), signed)
        codes_of = nibbles(builder, load(builder, codes_, entries.type))
        halves = [lookup16(context, builder, entries, half) for half in codes_of]
        results = []
        for row, total in enumerate(cgutils.unpack_tuple(builder, totals_, totals.count)):
            sums = _dot(context, builder, halves, x_)
            eight = ir.VectorType(F32, 8)
            factor = joined(
                builder, [splat(builder, eight, load(builder, factors_, F32, 64 * row + 4 * half)) for half in range(2)]
            )
            operands = [builder.sitofp(sums, F32X16), factor, total]
            results.append(call(builder, "llvm.fma.v16f32", F32X16, operands))
            x_ = builder.add(x_, stride_)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, *([types.intp] * 5)), codegen


# Sums of weighted rows.


class _Strip:
    """Emits steps for a strip of 1 or 2 units; its sums are two f32x16 of 16-bit integers for each unit."""

    def __init__(self, context: Any, builder: Any, n_sums: int) -> None:
        self.context, self.builder, self.n_units = context, builder, n_sums // 2
        self.is_paired = target_has(context, "avx2")
        self.n_bytes = 64 if target_has(context, "avx512bw") and self.n_units == 2 else 32  # of a register
        self.n_parts = 32 * self.n_units // self.n_bytes

    def operands(self, lines: list[Any], table: Any) -> list[Any]:
        """Two rows' entries: interleaved and moved up, or one after the other, 32 columns each."""
        kind = ir.VectorType(I8, self.n_bytes)
        entries = load(self.builder, table, kind, 0 if self.is_paired else SIGNED_TABLE)
        found = []
        for part in range(self.n_parts):
            codes = [load(self.builder, line, kind, self.n_bytes * part) for line in lines]
            halves = [nibbles(self.builder, line) for line in (self._interleaved(*codes) if self.is_paired else codes)]
            for nibble in zip(*halves, strict=True):
                found += [lookup16(self.context, self.builder, entries, line) for line in nibble]
        return found

    def _interleaved(self, first: Any, second: Any) -> list[Any]:
        """Bytes of both in turn; as x86 does it, from the lower and the upper halves of each 16."""
        halves = []
        for half in (0, 8):
            lanes = []
            for start in range(half, self.n_bytes, 16):
                for lane in range(start, start + 8):
                    lanes += [lane, self.n_bytes + lane]
            halves.append(_pick(self.builder, first, second, lanes))
        return halves

    def split(self, value: Any) -> list[Any]:
        """The registers of a tuple of sums."""
        whole = [self.builder.bitcast(v, I16X32) for v in cgutils.unpack_tuple(self.builder, value, 2 * self.n_units)]
        if not self.is_paired or self.n_bytes == 64:
            return whole
        return [half for both in whole for half in parts(self.builder, both, 2)]

    def packed(self, sums: list[Any], kind: Any) -> Any:
        if self.is_paired and self.n_bytes == 32:
            sums = [joined(self.builder, sums[at : at + 2]) for at in range(0, len(sums), 2)]
        return self.context.make_tuple(self.builder, kind, [self.builder.bitcast(value, F32X16) for value in sums])

    def spread(self, address: Any, number: int) -> Any:
        """The 4 bytes of each group that sum `number` belongs to, in its lanes, as 16-bit integers."""
        kind = ir.VectorType(I16, self.n_bytes // 2)
        nibble = number // 2 % 2
        if self.n_bytes == 64:
            four = load(self.builder, address, ir.VectorType(I32, 4))
            words = _pick(self.builder, four, four, [nibble] * 8 + [2 + nibble] * 8)
        else:
            group = 2 * (number // 4) + nibble
            words = splat(self.builder, ir.VectorType(I32, 8), load(self.builder, address, I32, 4 * group))
        return self.builder.bitcast(words, kind)

    def start(self, offsets: Any) -> list[Any]:
        if not self.is_paired:
            return [constant(I16X32, 0)] * (2 * self.n_units)
        return [self.spread(offsets, number) for number in range(4 * self.n_parts)]

    def add(self, sums: list[Any], operands: list[Any], weights: Any) -> list[Any]:
        builder, results = self.builder, []
        if self.is_paired:
            name = "llvm.x86.avx512.pmaddubs.w.512" if self.n_bytes == 64 else "llvm.x86.avx2.pmadd.ub.sw"
            for number, (total, pair) in enumerate(zip(sums, operands, strict=True)):
                weight = builder.bitcast(self.spread(weights, number), pair.type)
                results.append(builder.add(total, call(builder, name, total.type, [pair, weight])))
            return results
        for group, total in enumerate(sums):
            for row in range(2):
                weight = builder.sext(load(builder, weights, I8, 4 * group + row), I16)
                entries = builder.sext(operands[2 * group + row], I16X32)
                total = builder.add(total, builder.mul(entries, splat(builder, I16X32, weight)))
            results.append(total)
        return results

    def columns(self, sums: list[Any]) -> list[tuple[int, Any]]:
        """The sums as int32, 16 or 8 columns each, with the first column's number."""
        found = []
        if not self.is_paired:
            for at, both in enumerate(sums):
                found += [(32 * at + 16 * half, value) for half, value in enumerate(parts(self.builder, both, 2))]
        elif self.n_bytes == 32:  # a sum holds columns 0..7 and 16..23 of a group, or those 8 further on
            for at, both in enumerate(sums):
                first = 32 * (at // 2) + 8 * (at % 2)
                found += [(first + 16 * half, value) for half, value in enumerate(parts(self.builder, both, 2))]
        else:  # the same of two units' groups
            for at in range(0, 4, 2):
                for quarter in range(4):
                    lanes = [*range(8 * quarter, 8 * quarter + 8), *range(32 + 8 * quarter, 40 + 8 * quarter)]
                    first = 16 * at + 32 * (quarter & 2) + 16 * (quarter & 1)
                    found.append((first, _pick(self.builder, sums[at], sums[at + 1], lanes)))
        return [(first, self.builder.sext(v, ir.VectorType(I32, v.type.count))) for first, v in found]


@intrinsic
def start_sums(typing: Any, cells: Any, offsets: Any) -> Any:
    """Sums of no rows, two for each unit of the strip: len(cells); offsets: address of a word for each group."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        strip = _Strip(context, builder, cells.count)
        return strip.packed(strip.start(arguments[1]), signature.return_type)

    return types.UniTuple(f32x16, cells.count)(cells, types.intp), codegen


@intrinsic
def add_pair(typing: Any, sums: Any, first: Any, second: Any, table: Any, weights: Any) -> Any:
    """Sums plus two rows' entries times their weights; first, second: addresses of the rows' codes in this strip;
    weights: address of 4 bytes for each group: the rows' weights, twice."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, first_, second_, table_, weights_ = arguments
        strip = _Strip(context, builder, sums.count)
        operands = strip.operands([first_, second_], table_)
        return strip.packed(strip.add(strip.split(sums_), operands, weights_), signature.return_type)

    return sums(sums, *([types.intp] * 4)), codegen


@intrinsic
def unpack_pair(typing: Any, cells: Any, first: Any, second: Any, table: Any, buffer: Any) -> Any:
    """Two rows' entries at `buffer`, 128 bytes a unit, for add_unpacked_pair; the rest as for add_pair."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, first_, second_, table_, buffer_ = arguments
        for value in _Strip(context, builder, cells.count).operands([first_, second_], table_):
            builder.store(value, pointer(builder, buffer_, value.type)).align = 1
            buffer_ = builder.add(buffer_, ir.Constant(I64, value.type.count))
        return context.get_dummy_value()

    return types.void(cells, *([types.intp] * 4)), codegen


@intrinsic
def add_unpacked_pair(typing: Any, sums: Any, buffer: Any, weights: Any) -> Any:
    """The same as add_pair, of what unpack_pair left at `buffer`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums_, buffer_, weights_ = arguments
        strip = _Strip(context, builder, sums.count)
        kind = ir.VectorType(I8, strip.n_bytes)
        n_operands = 128 * strip.n_units // strip.n_bytes
        operands = [load(builder, buffer_, kind, strip.n_bytes * number) for number in range(n_operands)]
        return strip.packed(strip.add(strip.split(sums_), operands, weights_), signature.return_type)

    return sums(sums, types.intp, types.intp), codegen


def _widen(context: Any, builder: Any, sums: Any, n_sums: int, totals: Any, is_first: bool) -> Any:
    strip = _Strip(context, builder, n_sums)
    for column, value in strip.columns(strip.split(sums)):
        at = builder.add(totals, ir.Constant(I64, 4 * column))
        total = value if is_first else builder.add(load(builder, at, value.type), value)
        builder.store(total, pointer(builder, at, value.type)).align = 4
    return context.get_dummy_value()


@intrinsic
def keep_wide(typing: Any, sums: Any, totals: Any) -> Any:
    """Puts the sums as int32 at `totals`, column after column."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _widen(context, builder, arguments[0], sums.count, arguments[1], True)

    return types.void(sums, types.intp), codegen


@intrinsic
def add_wide(typing: Any, sums: Any, totals: Any) -> Any:
    """Adds the sums to what keep_wide put there."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _widen(context, builder, arguments[0], sums.count, arguments[1], False)

    return types.void(sums, types.intp), codegen


def _finished(context: Any, builder: Any, sums: Any, n_sums: int, totals: Any, factors: Any, out: Any) -> Any:
    strip = _Strip(context, builder, n_sums)
    for column, value in strip.columns(strip.split(sums)):
        floats = ir.VectorType(F32, value.type.count)
        if totals is not None:
            value = builder.add(value, load(builder, totals, value.type, 4 * column))
        at = builder.add(out, ir.Constant(I64, 4 * column))
        factor = splat(builder, floats, load(builder, factors, F32, column // 32 * 4))
        operands = [builder.sitofp(value, floats), factor, load(builder, at, floats)]
        total = call(builder, f"llvm.fma.v{floats.count}f32", floats, operands)
        builder.store(total, pointer(builder, at, floats)).align = 4
    return context.get_dummy_value()


@intrinsic
def finish_sums(typing: Any, sums: Any, factors: Any, out: Any) -> Any:
    """out[column] += sum x factor, the columns' fp32 at `out`, one factor for each group at `factors`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _finished(context, builder, arguments[0], sums.count, None, *arguments[1:])

    return types.void(sums, types.intp, types.intp), codegen


@intrinsic
def finish_wide(typing: Any, sums: Any, totals: Any, factors: Any, out: Any) -> Any:
    """The same with the int32 at `totals` added to the sums first."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _finished(context, builder, arguments[0], sums.count, *arguments[1:])

    return types.void(sums, types.intp, types.intp, types.intp), codegen


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
def weigh_pair(typing: Any, first: Any, second: Any, steps: Any, total: Any, address: Any) -> Any:
    """The weights rint(value x steps) of two rows in 16 groups, 4 bytes a group at `address` as add_pair reads them.

    first, second, steps: f32x16. Returns total, 16 int32 carried as f32x16, with the weights added.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        steps_, total_ = Lanes(context, builder, arguments[2]), builder.bitcast(arguments[3], I32X16)
        rows = []
        for value in arguments[:2]:
            bits = (Lanes(context, builder, value) * steps_ + MAGIC).bits()  # its low 16 are the weight's
            rows.append(bits)
            total_ = builder.add(total_, bits)
        pair = builder.or_(builder.and_(rows[0], integers(255)), builder.shl(rows[1], integers(8)))
        pair = builder.or_(builder.and_(pair, integers(0xFFFF)), builder.shl(pair, integers(16)))
        builder.store(pair, pointer(builder, arguments[4], I32X16)).align = 4
        return builder.bitcast(total_, F32X16)

    return f32x16(f32x16, f32x16, f32x16, f32x16, types.intp), codegen


@intrinsic
def store_offsets(typing: Any, total: Any, address: Any) -> Any:
    """What the sums of these weights begin with: -32 times weigh_pair's total, twice in 16 bits for each group."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total_ = builder.bitcast(arguments[0], I32X16)
        low = builder.and_(builder.mul(total_, integers(-NARROW_LIMIT)), integers(0xFFFF))
        both = builder.or_(low, builder.shl(low, integers(16)))
        builder.store(both, pointer(builder, arguments[1], I32X16)).align = 4
        return context.get_dummy_value()

    return types.void(f32x16, types.intp), codegen
