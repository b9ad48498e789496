"""Arithmetic on 16 fp32 lanes: loads and stores of partial vectors, sums in a fixed order, exp.

LLVM reorders and contracts no operation (there are no fast-math flags): fused multiply-adds are written explicitly and
used if the target has them. Sources: exp by Cody and Waite's reduction and Taylor's series; fp32 to fp16 by F. Giesen's
integer method (public domain), for targets without the conversion instruction.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hetero_ee_cpu_ops.simd.bytes import (
    F16,
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
    half_to_float,
    splat,
    target_has,
)

I8X16, I16X16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)
MAGIC = 1.5 * 2.0**23  # adding it rounds to the nearest integer, ties to even; its low bits then hold that integer
MAGIC_BITS = 0x4B400000
HALF_LARGEST = 65504.0  # fp16's largest value
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4  # 9 bits and the rest, so that n * LN2_HIGH is exact
EXP_LOWEST, EXP_HIGHEST = -105.0, 89.0  # beyond: 0 and infinity
EXP_SERIES = [1 / factorial for factorial in (5040, 720, 120, 24, 6, 2)]  # of (e^r - 1 - r) / r^2; next term 5e-9


class Lanes:
    """16 fp32 lanes while LLVM code is generated, with operators, so that formulas can be written as usual."""

    __slots__ = ("builder", "context", "value")

    def __init__(self, context: Any, builder: Any, value: Any) -> None:
        self.context, self.builder, self.value = context, builder, value

    def _of(self, value: Any) -> "Lanes":
        return Lanes(self.context, self.builder, value)

    def constant(self, value: float) -> "Lanes":
        return self._of(self._operand(value))

    def _operand(self, other: Any) -> Any:
        return other.value if isinstance(other, Lanes) else ir.Constant(F32X16, [float(other)] * 16)

    def __add__(self, other: Any) -> "Lanes":
        return self._of(self.builder.fadd(self.value, self._operand(other)))

    def __sub__(self, other: Any) -> "Lanes":
        return self._of(self.builder.fsub(self.value, self._operand(other)))

    def __mul__(self, other: Any) -> "Lanes":
        return self._of(self.builder.fmul(self.value, self._operand(other)))

    def __truediv__(self, other: Any) -> "Lanes":
        return self._of(self.builder.fdiv(self.value, self._operand(other)))

    def times_plus(self, factor: Any, term: Any) -> "Lanes":
        """Return self * factor + term, rounded once if the target has fused multiply-add."""
        return self._of(fused(self.context, self.builder, self.value, self._operand(factor), self._operand(term)))

    def where(self, relation: str, limit: Any, yes: Any, no: Any) -> "Lanes":
        """Select `yes` in lanes where self < limit (or another ordered relation; false for NaN), else `no`."""
        test = self.builder.fcmp_ordered(relation, self.value, self._operand(limit))
        return self._of(self.builder.select(test, self._operand(yes), self._operand(no)))

    def magnitude(self) -> "Lanes":
        bits = self.builder.and_(self.bits(), integers(0x7FFFFFFF))
        return self._of(self.builder.bitcast(bits, F32X16))

    def bits(self) -> Any:
        return self.builder.bitcast(self.value, I32X16)

    def exp(self) -> "Lanes":
        """Return e^self to 1.5e-7 relative (denormal results to their last bit); NaN stays NaN."""
        x = self.where("<", EXP_LOWEST, EXP_LOWEST, self)
        x = x.where(">", EXP_HIGHEST, EXP_HIGHEST, x)
        shifted = x.times_plus(1.4426950408889634, MAGIC)
        n = shifted - MAGIC
        r = n.times_plus(-LN2_HIGH, x)
        r = n.times_plus(-LN2_LOW, r)
        series = self._of(ir.Constant(F32X16, [EXP_SERIES[0]] * 16))
        for coefficient in EXP_SERIES[1:]:
            series = series.times_plus(r, coefficient)
        result = (r * r).times_plus(series, r) + 1.0
        if target_has(self.context, "avx512f"):  # one instruction instead of eight, with the same bits
            mask, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
            arguments = [result.value, n.value, result.value, mask, rounding]
            return self._of(call(self.builder, "llvm.x86.avx512.mask.scalef.ps.512", F32X16, arguments))
        exponent = self.builder.sub(shifted.bits(), integers(MAGIC_BITS))
        first = self.builder.ashr(exponent, integers(1))  # 2^n as two factors: n can exceed fp32's exponents
        second = self.builder.sub(exponent, first)
        return result * self._power(first) * self._power(second)

    def _power(self, exponent: Any) -> "Lanes":
        bits = self.builder.shl(self.builder.add(exponent, integers(127)), integers(23))
        return self._of(self.builder.bitcast(bits, F32X16))


def integers(value: int) -> Any:
    return ir.Constant(I32X16, [value] * 16)


def fused(context: Any, builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once if the target has the instruction, since a library call is 100x slower."""
    if target_has(context, "fma") or target_has(context, "avx512f") or "aarch64" in builder.module.triple:
        return call(builder, "llvm.fma.v16f32", F32X16, [a, b, c])
    return builder.fadd(builder.fmul(a, b), c)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def fold(builder: Any, values: list[Any], combine: Any) -> Any:
    """Reduce each of 1, 2, 4, 8 or 16 vectors of 16 lanes; vector i's result is in lane 16 i / len(values).

    Lanes are always combined as i with i + 8, i + 4, i + 2, i + 1; `combine` must commute. To reduce two vectors at
    once, a blend and a shuffle first put half of each into one vector.
    """
    for width in (8, 4, 2, 1):
        moved = [lane ^ width for lane in range(16)]
        if len(values) == 1:
            values = [combine(values[0], _chosen(builder, values[0], values[0], moved))]
            continue
        stay = [lane if lane & width == 0 else 16 + lane for lane in range(16)]
        cross = [other if lane & width == 0 else 16 + other for lane, other in enumerate(moved)]
        half, pairs = len(values) // 2, []
        for first, second in zip(values[:half], values[half:], strict=True):
            pairs.append(combine(_chosen(builder, first, second, stay), _chosen(builder, first, second, cross)))
        values = pairs
    return values[0]


def _chosen(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    """Return 16 lanes chosen from two vectors. Lanes of the second are numbered from 16."""
    return builder.shuffle_vector(first, second, ir.Constant(I32X16, lanes))


def float_to_half(context: Any, builder: Any, value: Any) -> Any:
    """Convert fp32 to fp16 bit patterns: to nearest, ties to even, clamped to the finite range; NaN stays NaN."""
    lanes = Lanes(context, builder, value)
    value = lanes.where(">", HALF_LARGEST, HALF_LARGEST, lanes.where("<", -HALF_LARGEST, -HALF_LARGEST, lanes)).value
    if target_has(context, "f16c") or target_has(context, "avx512f") or target_has(context, "fullfp16"):
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(F16, 16)), I16X16)
    bits = builder.bitcast(value, I32X16)
    magnitude = builder.and_(bits, integers(0x7FFFFFFF))
    sign = builder.lshr(builder.and_(bits, integers(0x80000000)), integers(16))
    odd = builder.and_(builder.lshr(magnitude, integers(13)), integers(1))
    rebased = builder.add(builder.add(magnitude, integers((((15 - 127) << 23) + 0xFFF) & 0xFFFFFFFF)), odd)
    normal = builder.lshr(rebased, integers(13))
    rounder = ir.Constant(F32X16, [0.5] * 16)  # its last bit is fp16's smallest subnormal
    subnormal = builder.fadd(builder.bitcast(magnitude, F32X16), rounder)
    subnormal = builder.sub(builder.bitcast(subnormal, I32X16), integers(0x3F000000))
    result = builder.select(builder.icmp_unsigned("<", magnitude, integers(113 << 23)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">", magnitude, integers(0x7F800000)), integers(0x7E00), result)
    return builder.trunc(builder.or_(result, sign), I16X16)


def lane_mask(builder: Any, first: Any, end: Any) -> Any:
    """Return a mask that is true in lanes first..end-1."""
    lanes = ir.Constant(I32X16, list(range(16)))
    first, end = (splat(builder, I32X16, builder.trunc(bound, I32)) for bound in (first, end))
    return builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))


def masked_load(builder: Any, address: Any, kind: Any, mask: Any) -> Any:
    """Load the lanes of `kind` for which `mask` is true. The others are 0, and their memory is not read."""
    name = f"llvm.masked.load.v16{_letters(kind)}.p0"
    zero = ir.Constant(kind, [0] * 16)
    return call(builder, name, kind, [pointer(builder, address, kind), ir.Constant(I32, 1), mask, zero])


def masked_store(builder: Any, value: Any, address: Any, mask: Any) -> None:
    name = f"llvm.masked.store.v16{_letters(value.type)}.p0"
    target = pointer(builder, address, value.type)
    call(builder, name, ir.VoidType(), [value, target, ir.Constant(I32, 1), mask])


def _letters(kind: Any) -> str:
    return "f32" if kind.element == F32 else f"i{kind.element.width}"


def operation(operands: int, formula: Any, name: str, meaning: str) -> Any:
    """Return an intrinsic of f32x16 operands that computes formula(Lanes, ...)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return formula(*(Lanes(context, builder, argument) for argument in arguments)).value

    signature = f32x16(*[f32x16] * operands)
    if operands == 1:
        function: Any = lambda typing, a: (signature, codegen)  # noqa: E731
    elif operands == 2:
        function = lambda typing, a, b: (signature, codegen)  # noqa: E731
    else:
        function = lambda typing, a, b, c: (signature, codegen)  # noqa: E731
    function.__name__, function.__doc__ = name, meaning
    return intrinsic(function)


add = operation(2, lambda a, b: a + b, "add", "a + b.")
subtract = operation(2, lambda a, b: a - b, "subtract", "a - b.")
multiply = operation(2, lambda a, b: a * b, "multiply", "a * b.")
multiply_add = operation(3, lambda a, b, c: a.times_plus(b, c), "multiply_add", "a * b + c.")
maximum = operation(2, lambda a, b: a.where("<", b, b, a), "maximum", "The greater; a if either is NaN.")
exponential = operation(1, lambda a: a.exp(), "exponential", "e^a.")
magnitude = operation(1, lambda a: a.magnitude(), "magnitude", "|a|.")


@intrinsic
def spread(typing: Any, value: Any) -> Any:
    """Return 16 lanes that all hold `value`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return splat(builder, F32X16, arguments[0])

    return f32x16(types.float32), codegen


def loader(element: Any, context: Any, builder: Any) -> tuple[Any, Any]:
    """Return the LLVM type in memory of values like `element`, and a function that converts them to fp32."""
    if element == types.float32:
        return F32X16, lambda value: value
    if element == types.uint16:
        return I16X16, lambda value: half_to_float(context, builder, value)
    if element == types.int16:  # bf16: the upper half of an fp32 number
        high = constant(I32X16, 16)
        return I16X16, lambda value: builder.bitcast(builder.shl(builder.zext(value, I32X16), high), F32X16)
    return I8X16, lambda value: builder.sitofp(builder.sext(value, I32X16), F32X16)


ELEMENTS = (types.float32, types.uint16, types.int16, types.int8)


@intrinsic
def element_bytes(typing: Any, element: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(I64, element.bitwidth // 8)

    return types.intp(element), codegen


@intrinsic
def first_lane(typing: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], ir.Constant(I32, 0))

    return types.float32(f32x16), codegen


@intrinsic
def load16(typing: Any, address: Any, element: Any) -> Any:
    """Load 16 values from `address` as fp32. `element` is any value of the type that they are stored as."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        value = builder.load(pointer(builder, arguments[0], kind))
        value.align = 1
        return convert(value)

    return f32x16(types.intp, element), codegen


@intrinsic
def load_lanes(typing: Any, address: Any, first: Any, end: Any, element: Any) -> Any:
    """Load lanes first..end-1 as fp32; the others are 0, and their memory is not read. element: see load16."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        return convert(masked_load(builder, arguments[0], kind, lane_mask(builder, *arguments[1:3])))

    return f32x16(types.intp, types.intp, types.intp, element), codegen


@intrinsic
def keep_lanes(typing: Any, value: Any, first: Any, end: Any, other: Any) -> Any:
    """Return `value` in lanes first..end-1 and the number `other` in the other lanes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        mask = lane_mask(builder, *arguments[1:3])
        return builder.select(mask, arguments[0], splat(builder, F32X16, arguments[3]))

    return f32x16(f32x16, types.intp, types.intp, types.float32), codegen


@intrinsic
def store16(typing: Any, value: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[0], pointer(builder, arguments[1], F32X16)).align = 1
        return context.get_dummy_value()

    return types.void(f32x16, types.intp), codegen


@intrinsic
def store_lanes(typing: Any, value: Any, address: Any, count: Any, element: Any) -> Any:
    """Store the first `count` lanes as `element`: fp32, fp16 bits (uint16, see float_to_half), or int8.

    int8 rounds to nearest, ties to even; its values must be in -128..127.
    """
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = arguments[0]
        if element == types.uint16:
            lanes = float_to_half(context, builder, lanes)
        elif element == types.int8:
            rounded = Lanes(context, builder, lanes) + MAGIC
            lanes = builder.trunc(builder.sub(rounded.bits(), integers(MAGIC_BITS)), I8X16)
        mask = lane_mask(builder, ir.Constant(I64, 0), arguments[2])
        masked_store(builder, lanes, arguments[1], mask)
        return context.get_dummy_value()

    return types.void(f32x16, types.intp, types.intp, element), codegen


@intrinsic
def lane_sum(typing: Any, value: Any) -> Any:
    """Return the sum of all lanes, adding lanes i and i + 8, then i + 4, i + 2, i + 1."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(fold(builder, [arguments[0]], builder.fadd), ir.Constant(I32, 0))

    return types.float32(f32x16), codegen


@intrinsic
def lane_maximum(typing: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def greater(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", a, b), b, a)

        return builder.extract_element(fold(builder, [arguments[0]], greater), ir.Constant(I32, 0))

    return types.float32(f32x16), codegen


def _scalar(kind: Any, numba_type: Any, name: str) -> tuple[Any, Any]:
    """Return intrinsics that read and write one number at an address."""

    def read_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(pointer(builder, arguments[0], kind))
        value.align = 1
        return value

    def write_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[0], pointer(builder, arguments[1], kind)).align = 1
        return context.get_dummy_value()

    def read(typing: Any, address: Any) -> Any:
        return numba_type(types.intp), read_code

    def write(typing: Any, value: Any, address: Any) -> Any:
        return types.void(numba_type, types.intp), write_code

    read.__name__, write.__name__ = f"read_{name}", f"write_{name}"
    return intrinsic(read), intrinsic(write)


read_float, write_float = _scalar(F32, types.float32, "float")
write_integer = _scalar(I64, types.int64, "integer")[1]


@intrinsic(prefer_literal=True)
def scratch(typing: Any, n_bytes: Any) -> Any:
    """Return the address of n_bytes (a constant) on the stack, 64-byte aligned, valid until the function returns."""
    if not isinstance(n_bytes, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():  # Numba's alloca_once clears memory, with one store per byte
            memory = builder.alloca(ir.ArrayType(I8, n_bytes.literal_value))
        memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.intp(n_bytes), codegen
