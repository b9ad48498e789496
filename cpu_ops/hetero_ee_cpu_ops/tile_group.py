"""LLVM code for the innermost step of tile matmuls: one group of a row block times several rows of activations.

For 16 rows n of W, 32 columns k, and every row t:  total[t, n] += s[n] a[t] (sum over k of entry[n, k] q[t, k])
with q the int8 codes of the activation and a their scale. The integer sum is exact, so every instruction set gives the
same bits. tile_kind.py lists the kinds of tile. For ZEROS, z[n] (sum over k of q[t, k]) is subtracted from the integer
sum, as fp32, by one fused multiply-add, which is exact for a whole zero point z. For SIX, the two halves of the columns
are summed separately, and each is added with its own scale, the first half first.

VNNI multiplies unsigned by signed bytes: a bias (8, 16, 32 or 128) is added to the entries, and the sum starts at
-bias sum(q). Arm's dot product multiplies two signed bytes. AVX2's multiply of unsigned by signed adds two products in
16 bits, and widening such sums costs as much as making them. Codes below 16 are widened once per group: 8 x 2 x 15 x
127 = 30,480 fits; codes of 5 bits after four products, of 6 bits after two. Narrow entries, with a bias of 32, are
widened after four products: such a sum starts at -32 times the sum of its 8 codes, may wrap around on its way, and ends
within 4 x 2 x 32 x 127 = 32,512. Full bytes are computed as |entry| times q with the sign of entry, and each product is
widened.

If a register holds 8 rows of W, each broadcast of activations is multiplied by both halves of a tile, and each operand
by four rows of activations: 6 loads for 8 products, where one half or all rows at once need 8 and more.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
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
    broadcast4,
    call,
    constant,
    entries16,
    half_to_float,
    joined,
    load,
    nibbles,
    parts,
    splat,
    target_has,
)
from hetero_ee_cpu_ops.tile_kind import (
    BYTES,
    CODEBOOK,
    FIVE,
    FIVE_ZEROS,
    LINEAR,
    NARROW,
    SIX,
    ZEROS,
    TileKind,
    adds_in_16_bits,
    has_wide_registers,
)

UNPACKED_BYTES = 512  # per tile
HIGH_BITS = {FIVE: 1, SIX: 2}  # of a code, in lines that follow those of the low bits
SUMMED_IN_16_BITS = {NARROW: 4, FIVE: 4, SIX: 2}  # products that AVX2 adds before it widens their sum; all by default


class Emitter:
    """Emits the LLVM code of the step for one target and one kind of tile.

    One register holds 16 rows of the tile, or two registers hold 8 rows each. With n_parts = 1, only the rows of one
    register are computed.
    """

    def __init__(self, context: Any, builder: Any, kind: TileKind, n_parts: int = 0) -> None:
        self.context, self.builder, self.has_zeros = context, builder, kind in (ZEROS, FIVE_ZEROS)
        self.kind = {ZEROS: LINEAR, FIVE_ZEROS: FIVE}.get(kind, kind)
        self.lanes = 64 if has_wide_registers(context) else 32
        self.n_parts = n_parts or 64 // self.lanes
        self.has_vnni = target_has(context, "avx512vnni")
        self.has_vnni_256 = target_has(context, "avxvnni") and not self.has_vnni
        self.has_avx2 = adds_in_16_bits(context)
        self.has_neon_dot = target_has(context, "dotprod")
        # If both operands are signed, entries need no bias (a code below 16 is signed and unsigned).
        self.signed = (self.has_avx2 or self.has_neon_dot) and kind in (CODEBOOK, BYTES)

    @property
    def halves(self) -> tuple[tuple[int, ...], ...]:
        """The sets of halves, 0 for columns 0 to 15 and 1 for the others, whose products are one integer sum."""
        return ((0,), (1,)) if self.kind == SIX else ((0, 1),)

    def operands(self, tile: Any, table: Any, halves: Sequence[int]) -> Iterator[tuple[list[Any], int]]:
        """Yield the entries as bytes, four columns at a time, with the first column's index; emitted on demand."""
        bytes_type = ir.VectorType(I8, self.lanes)
        if self.kind == BYTES:
            flip = constant(bytes_type, 0 if self.signed else -128)
            for column in range(0, 32, 4):
                yield [self.builder.xor(line, flip) for line in self._line(tile, column // 4)], column
            return
        entries = None
        if self.kind in (CODEBOOK, NARROW):
            entries = load(self.builder, table, bytes_type, 64 if self.signed else 0)
        for line in range(4):
            pairs = [self._nibbles(part, entries) for part in self._line(tile, line)]
            for half in halves:
                yield self._widened_codes([pair[half] for pair in pairs], tile, 4 * half + line), 4 * line + 16 * half

    def _nibbles(self, line: Any, entries: Any) -> Any:
        """Return the entries of the low and the high nibbles, or the codes themselves if there is no codebook."""
        return nibbles(self.builder, line) if entries is None else entries16(self.context, self.builder, entries, line)

    def _widened_codes(self, codes: list[Any], tile: Any, number: int) -> list[Any]:
        """Add the high bits of columns 4 * number .. 4 * number + 3 to their low 4 bits, if the kind has high bits."""
        n_bits = HIGH_BITS.get(self.kind)
        if n_bits is None:
            return codes
        line, place = divmod(number * n_bits, 8)
        found = []
        for low, high in zip(codes, self._line(tile, 4 + line), strict=True):
            words = ir.VectorType(
                I16, high.type.count // 2
            )  # x86 shifts words, not bytes; other bytes' bits are masked
            high = self.builder.bitcast(high, words)
            shift = self.builder.shl if place < 4 else self.builder.lshr
            high = self.builder.bitcast(shift(high, constant(words, abs(4 - place))), low.type)
            found.append(self.builder.or_(low, self.builder.and_(high, constant(low.type, (2**n_bits - 1) << 4))))
        return found

    def unpacked(self, buffer: Any, halves: Sequence[int]) -> Iterator[tuple[list[Any], int]]:
        """Yield what `operands` yields, read from where unpack_group stored it."""
        order = range(8) if self.kind == BYTES else [4 * half + line for line in range(4) for half in (0, 1)]
        for number, column in enumerate(order):
            if column // 4 in halves:
                yield self._line(buffer, number), 4 * column

    def _line(self, address: Any, line: int) -> list[Any]:
        bytes_type = ir.VectorType(I8, self.lanes)
        return [load(self.builder, address, bytes_type, 64 * line + self.lanes * part) for part in range(self.n_parts)]

    def group_sums(
        self, operands: Iterator[tuple[list[Any], int]], x: Any, offset: Any, rows: Sequence[int], half: int = 0
    ) -> Any:
        """Return exact int32 sums over the operands: for each row of activations, vectors with a lane per weight row.

        half: for SIX, the half of the columns, which selects one of a row's two offsets.
        """
        n_operands = 4 if self.kind == SIX else 8
        n_each = SUMMED_IN_16_BITS.get(self.kind, n_operands) if self.has_avx2 else n_operands
        found: list[list[Any]] = []
        for number in range(n_operands // n_each):
            totals = [[self._start(offset, row, number, half)] * self.n_parts for row in rows]
            for weights, column in islice(operands, n_each):
                for at, row in enumerate(rows):
                    codes = broadcast4(self.builder, x, 32 * row + column, self.lanes)
                    totals[at] = self._pinned(
                        [self._dot4(*pair, codes) for pair in zip(totals[at], weights, strict=True)]
                    )
            for at, row in enumerate(rows):
                ends = [self._end(total, offset, row, number, half) for total in totals[at]]
                totals[at] = self._pinned(
                    [self.builder.add(*pair) for pair in zip(ends, found[at], strict=True)] if found else ends
                )
            found = totals
        return found

    def numbers(self, sums: Any, zeros: Any, offset: Any, row: int) -> Any:
        """Convert a row's integer sums to fp32, and subtract the zero points' contribution if there are any.

        `zeros` are z / 8, because the row's offset is -8 sum(q).
        """
        numbers = self.builder.sitofp(sums, ir.VectorType(F32, sums.type.count))
        if zeros is None:
            return numbers
        sum_q = self.builder.sitofp(load(self.builder, offset, I32, 4 * row), F32)
        return call(
            self.builder,
            f"llvm.fma.v{sums.type.count}f32",
            numbers.type,
            [zeros, splat(self.builder, numbers.type, sum_q), numbers],
        )

    def zeros(self, scales: Any, first: int, n: int) -> Any:
        """Return the zero points of n weight rows from row `first` on, divided by 8, fp32; None if there are none."""
        if not self.has_zeros:
            return None
        zeros = load(self.builder, scales, ir.VectorType(I16, n), 2 * (16 + first))
        return self.builder.fmul(
            half_to_float(self.context, self.builder, zeros), constant(ir.VectorType(F32, n), 0.125)
        )

    def _pinned(self, values: list[Any]) -> list[Any]:
        """Return the values unchanged, but force LLVM to compute them at this point.

        With registers of 8 rows LLVM would otherwise go row by row, and spill. In fours on unpacked tiles, a row of
        activations costs 37 us in this order, 49 us without (768 x 4096, m = 64, one thread, Zen 3, 2026-11-23).
        """
        if self.n_parts == 1:
            return values
        types_ = [value.type for value in values]
        constraints = ",".join(["=x"] * len(values) + [str(number) for number in range(len(values))])
        function = ir.FunctionType(ir.LiteralStructType(types_), types_)
        held = self.builder.asm(function, "", constraints, values, side_effect=True)
        return [self.builder.extract_value(held, number) for number in range(len(values))]

    def _start(self, offset: Any, row: int, number: int, half: int) -> Any:
        """Return a sum's initial value. For NARROW these are two of the row's four int16 offsets, repeated."""
        sums_type = ir.VectorType(I32, self.lanes // 4)
        if self.kind == NARROW:
            start = broadcast4(self.builder, offset, 8 * row + 4 * number, self.lanes)
            return self.builder.bitcast(start, ir.VectorType(I16, 16))
        if self.signed:
            return constant(sums_type, 0)
        if self.has_avx2:
            return constant(ir.VectorType(I16, 16), 0)
        return splat(self.builder, sums_type, self._offset(offset, row, half))

    def _end(self, total: Any, offset: Any, row: int, number: int, half: int) -> Any:
        if not self.has_avx2 or self.signed:
            return total
        total = self._widened(total)
        if self.kind == NARROW or number > 0:
            return total
        return self.builder.add(total, splat(self.builder, total.type, self._offset(offset, row, half)))

    def _offset(self, offset: Any, row: int, half: int) -> Any:
        """Return a row's -bias sum(q), int32, from the offset -8 sum(q); -128 sum(q) is stored as it is."""
        if self.kind == SIX:
            return load(self.builder, offset, I32, 8 * row + 4 * half)
        stored = load(self.builder, offset, I32, 4 * row)
        return self.builder.add(stored, stored) if self.kind == FIVE else stored

    def _dot4(self, total: Any, weight: Any, x: Any) -> Any:
        builder = self.builder
        if self.has_vnni:
            return call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, weight, x])
        if self.has_vnni_256:
            return call(builder, "llvm.x86.avx512.vpdpbusd.256", total.type, [total, weight, x])
        if self.has_avx2 and not self.signed:
            pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", total.type, [weight, x])
            return builder.add(total, pairs)
        if self.has_avx2:
            size = call(builder, "llvm.abs.v32i8", weight.type, [weight, ir.Constant(ir.IntType(1), 0)])
            signed_x = call(builder, "llvm.x86.avx2.psign.b", x.type, [x, weight])
            pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), [size, signed_x])
            return builder.add(total, self._widened(pairs))
        if self.has_neon_dot:
            return self._neon_dot4(total, weight, x)
        wide = ir.VectorType(I32, self.lanes)
        product = builder.mul(builder.zext(weight, wide), builder.sext(x, wide))
        for column in range(4):
            lanes = ir.Constant(ir.VectorType(I32, self.lanes // 4), list(range(column, self.lanes, 4)))
            total = builder.add(total, builder.shuffle_vector(product, product, lanes))
        return total

    def _neon_dot4(self, total: Any, weight: Any, x: Any) -> Any:
        """Return 16 dot products in four vectors, since Arm's registers hold 4 rows x 4 columns."""
        quarters = zip(*(parts(self.builder, value, 4) for value in (total, weight, x)), strict=True)
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return joined(self.builder, [call(self.builder, name, part[0].type, list(part)) for part in quarters])

    def _widened(self, pairs: Any) -> Any:
        ones = constant(pairs.type, 1)
        return call(self.builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [pairs, ones])


@intrinsic
def unpack_group(typing: Any, kind: Any, tile: Any, table: Any, buffer: Any) -> Any:
    """Store a tile's operands at `buffer`, 512 bytes, for add_unpacked. tile, table: see add_group."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, tile_, table_, buffer_ = arguments
        emitter = Emitter(context, builder, kind.kind)
        for weights, _ in emitter.operands(tile_, table_, (0, 1)):
            for weight in weights:
                builder.store(weight, builder.inttoptr(buffer_, weight.type.as_pointer())).align = 1
                buffer_ = builder.add(buffer_, ir.Constant(buffer_.type, emitter.lanes))
        return context.get_dummy_value()

    return types.void(kind, types.intp, types.intp, types.intp), codegen


@intrinsic
def add_group(
    typing: Any, kind: Any, totals: Any, tile: Any, scales: Any, table: Any, x: Any, scale: Any, offset: Any
) -> Any:
    """Add the group's products to totals[t] (f32x16) for every row t of activations.

    Args:
        tile: address of the tile.
        scales: address of its 16 fp16 scales; zero points follow, or for SIX the scales of the second half.
        table: address of 64 bytes of entries + 128 (+ 32 for NARROW), then 64 bytes of entries; 16 entries repeated.
        x: address of row 0's 32 codes. Here and below, those of the other rows follow.
        scale: address of row 0's fp32 scale.
        offset: address of row 0's int32 -8 sum(q), or -128 for BYTES and CODEBOOK; for NARROW four int16 and for SIX
            two int32, see quantize.py.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, totals_, tile_, scales_, table_, x_, scale_, offset_ = arguments
        emitter, rows = Emitter(context, builder, kind.kind), range(totals.count)
        results = cgutils.unpack_tuple(builder, totals_, totals.count)
        for number, halves in enumerate(emitter.halves):
            operands = emitter.operands(tile_, table_, halves)
            if emitter.n_parts == 1:  # registers hold all operands and totals, so row by row
                held = list(operands)
                sums = [emitter.group_sums(iter(held), x_, offset_, [row], number)[0] for row in rows]
            else:
                sums = emitter.group_sums(operands, x_, offset_, rows, number)
            weights = half_to_float(context, builder, load(builder, scales_, ir.VectorType(I16, 16), 32 * number))
            zeros = emitter.zeros(scales_, 0, 16)
            for row in rows:
                factor = builder.fmul(weights, splat(builder, F32X16, load(builder, scale_, F32, 4 * row)))
                numbers = emitter.numbers(joined(builder, sums[row]), zeros, offset_, row)
                results[row] = call(builder, "llvm.fma.v16f32", F32X16, [numbers, factor, results[row]])
        return context.make_tuple(builder, signature.return_type, results)

    address = types.intp
    return totals(kind, totals, *([address] * 6)), codegen


@intrinsic
def add_unpacked(typing: Any, kind: Any, totals: Any, buffer: Any, scales: Any, x: Any, scale: Any, offset: Any) -> Any:
    """Add a group as add_group does, for four rows, from unpack_group's operands. totals: address of 4 x 16 fp32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, totals_, buffer_, scales_, x_, scale_, offset_ = arguments
        emitter = Emitter(context, builder, kind.kind)
        n = 16 // emitter.n_parts
        vector, half = ir.VectorType(F32, n), ir.VectorType(I16, n)
        parts = range(emitter.n_parts)
        for number, halves in enumerate(emitter.halves):
            sums = emitter.group_sums(emitter.unpacked(buffer_, halves), x_, offset_, range(4), number)
            at_scales = [32 * number + 2 * n * part for part in parts]
            weights = [half_to_float(context, builder, load(builder, scales_, half, at)) for at in at_scales]
            zeros = [emitter.zeros(scales_, n * part, n) for part in parts]
            for row in range(4):
                scale = splat(builder, vector, load(builder, scale_, F32, 4 * row))
                for part, weight in enumerate(weights):
                    at = builder.add(totals_, ir.Constant(totals_.type, 64 * row + 4 * n * part))
                    values = [
                        emitter.numbers(sums[row][part], zeros[part], offset_, row),
                        builder.fmul(weight, scale),
                        load(builder, at, vector),
                    ]
                    total = call(builder, f"llvm.fma.v{n}f32", vector, values)
                    builder.store(total, builder.inttoptr(at, vector.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(kind, *([types.intp] * 6)), codegen
