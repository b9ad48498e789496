"""SIMD values inside ordinary Numba code: vector types that live in registers, and the few instructions the kernels need.

A Numba type whose machine type is an LLVM vector flows through a plain @njit loop. Generic operations are lowered by LLVM
to whatever the target has; the byte dot product, which LLVM does not find by itself, is chosen here by the features of the
JIT *target* (not of the host: an instruction the target lacks aborts the process).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64, F16, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()


def _vector_type(name: str, element: Any, lanes: int) -> tuple[Any, Any]:
    """A Numba type called `name` and its LLVM vector."""
    numba_type = type(name, (types.Type,), {})(name=name)
    llvm_type = ir.VectorType(element, lanes)

    @register_model(type(numba_type))
    class _Model(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, front_end_type: Any) -> None:
            super().__init__(manager, front_end_type, llvm_type)

    return numba_type, llvm_type


f32x16, F32X16 = _vector_type("f32x16", F32, 16)
U8X64, I32X16, I32X8, I16X32, I16X16 = (
    ir.VectorType(I8, 64),
    ir.VectorType(I32, 16),
    ir.VectorType(I32, 8),
    ir.VectorType(I16, 32),
    ir.VectorType(I16, 16),
)


def target_has(context: Any, feature: str) -> bool:
    """Whether the JIT target (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES, else this machine) has a feature."""
    return "+" + feature in context.codegen()._tm_features.split(",")


def splat(builder: Any, vector: Any, value: Any) -> Any:
    """`value` in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def constant(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def load(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """An unaligned load of `kind` from an integer address plus a constant."""
    moved = builder.add(address, ir.Constant(I64, offset)) if offset else address
    value = builder.load(builder.inttoptr(moved, kind.as_pointer()))
    value.align = 1
    return value


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Calls an LLVM intrinsic by name."""
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def halves(builder: Any, value: Any) -> list[Any]:
    """The lower and the upper half of a vector, for 256-bit instructions."""
    count = value.type.count // 2
    lanes = [ir.Constant(ir.VectorType(I32, count), list(range(first, first + count))) for first in (0, count)]
    return [builder.shuffle_vector(value, value, part) for part in lanes]


def joined(builder: Any, low: Any, high: Any) -> Any:
    count = low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * count), list(range(2 * count))))


def dot4(context: Any, builder: Any, total: Any, unsigned: Any, signed: Any, small: bool) -> Any:
    """total[i] += sum over c < 4 of unsigned[4i+c] * signed[4i+c]; i32x16, u8x64, i8x64.

    small: unsigned is at most 15, so that pairs of products can't saturate in 16 bits (AVX2).
    """
    if target_has(context, "avx512vnni"):
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, [total, unsigned, signed])
    if target_has(context, "avxvnni") or target_has(context, "avx2"):
        parts = zip(*(halves(builder, value) for value in (total, unsigned, signed)), strict=True)
        return joined(builder, *(_dot4_256(context, builder, *part, small) for part in parts))
    wide = ir.VectorType(I32, 64)
    product = builder.mul(builder.zext(unsigned, wide), builder.sext(signed, wide))
    for column in range(4):
        lanes = ir.Constant(I32X16, [4 * lane + column for lane in range(16)])
        total = builder.add(total, builder.shuffle_vector(product, product, lanes))
    return total


def _dot4_256(context: Any, builder: Any, total: Any, unsigned: Any, signed: Any, small: bool) -> Any:
    if target_has(context, "avxvnni"):
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", I32X8, [total, unsigned, signed])
    ones = constant(I16X16, 1)
    if small:
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", I16X16, [unsigned, signed])
        return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", I32X8, [pairs, ones]))
    low = builder.and_(unsigned, constant(unsigned.type, 127))  # u = (u & 127) + (u & 128): neither saturates
    high = builder.lshr(unsigned, constant(unsigned.type, 7))
    for part, weight in ((low, 1), (high, 128)):
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", I16X16, [part, signed])
        total = builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", I32X8, [pairs, constant(I16X16, weight)]))
    return total


def lookup16(context: Any, builder: Any, table: Any, indices: Any) -> Any:
    """table[index] for 64 byte indices below 16; table: 16 bytes repeated four times."""
    if target_has(context, "avx512bw"):
        return call(builder, "llvm.x86.avx512.pshuf.b.512", U8X64, [table, indices])
    if target_has(context, "avx2"):
        parts = zip(halves(builder, table), halves(builder, indices), strict=True)
        return joined(builder, *(call(builder, "llvm.x86.avx2.pshuf.b", ir.VectorType(I8, 32), list(part)) for part in parts))
    result = constant(U8X64, 0)
    for entry in range(16):  # no portable byte shuffle with run-time indices: sixteen selects
        value = splat(builder, U8X64, builder.extract_element(table, ir.Constant(I32, entry)))
        result = builder.select(builder.icmp_unsigned("==", indices, constant(U8X64, entry)), value, result)
    return result


def nibbles(builder: Any, line: Any) -> tuple[Any, Any]:
    """The low and the high nibbles of 64 bytes, as bytes."""
    mask = constant(U8X64, 15)
    shifted = builder.lshr(builder.bitcast(line, I16X32), constant(I16X32, 4))  # x86 shifts words, not bytes
    return builder.and_(line, mask), builder.and_(builder.bitcast(shifted, U8X64), mask)


def broadcast4(builder: Any, address: Any, offset: int) -> Any:
    """The 4 bytes at address + offset, repeated over 64 lanes."""
    return builder.bitcast(splat(builder, I32X16, load(builder, address, I32, offset)), U8X64)


def load_half16(context: Any, builder: Any, address: Any) -> Any:
    """16 fp16 values as f32x16."""
    if target_has(context, "f16c") or target_has(context, "avx512f") or target_has(context, "fullfp16"):
        return builder.fpext(load(builder, address, ir.VectorType(F16, 16)), F32X16)
    return _half_by_integers(builder, load(builder, address, ir.VectorType(I16, 16)))


def _half_by_integers(builder: Any, bits16: Any) -> Any:
    """fp16 to fp32 without the conversion call that generic targets lack. Subnormals and infinities included.

    Shifted into fp32's fields, the value is 2^-112 of itself; one multiplication rescales, and subnormals come right.
    """
    bits = builder.zext(bits16, I32X16)
    magnitude = builder.shl(builder.and_(bits, constant(I32X16, 0x7FFF)), constant(I32X16, 13))
    sign = builder.shl(builder.and_(bits, constant(I32X16, 0x8000)), constant(I32X16, 16))
    scaled = builder.fmul(builder.bitcast(magnitude, F32X16), constant(F32X16, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, I32X16), sign), F32X16)


@intrinsic
def zeros(typing: Any, rows: Any) -> Any:
    """One f32x16 of zeros for each element of the tuple `rows`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_tuple(builder, signature.return_type, [constant(F32X16, 0.0)] * rows.count)

    return types.UniTuple(f32x16, rows.count)(rows), codegen


@intrinsic
def store_rows(typing: Any, values: Any, address: Any, stride: Any) -> Any:
    """Stores vector t of the tuple at address + t * stride bytes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = arguments[1]
        for value in cgutils.unpack_tuple(builder, arguments[0], values.count):
            builder.store(value, builder.inttoptr(place, F32X16.as_pointer())).align = 4
            place = builder.add(place, arguments[2])
        return context.get_dummy_value()

    return types.void(values, types.intp, types.intp), codegen


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Asks for the cache line at `address`, to be read once soon. Any address is safe."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I8.as_pointer())
        flags = [ir.Constant(I32, value) for value in (0, 3, 1)]  # read, keep in all levels, data
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0"), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.intp), codegen
