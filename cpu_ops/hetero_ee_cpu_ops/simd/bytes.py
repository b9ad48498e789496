"""SIMD values inside ordinary Numba code: vector types that live in registers, and the instructions the kernels need.

A Numba type whose machine type is an LLVM vector flows through a plain @njit loop. LLVM lowers generic operations to
the target's instructions; the few it does not find are selected by the features of the JIT *target*, not of the host:
an instruction that the target lacks aborts the process.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)


class F32x16(types.Type):
    """Numba type of 16 fp32 lanes. Its class is at module level, so that unpickled kernels use it and not a copy."""


F32X16 = ir.VectorType(F32, 16)


@register_model(F32x16)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, front_end_type: Any) -> None:
        super().__init__(manager, front_end_type, F32X16)


f32x16 = F32x16(name="F32x16")
I32X16 = ir.VectorType(I32, 16)


def target_has(context: Any, feature: str) -> bool:
    """Return whether the JIT target has a feature. NUMBA_CPU_NAME and NUMBA_CPU_FEATURES set the target."""
    return "+" + feature in context.codegen()._tm_features.split(",")


def splat(builder: Any, vector: Any, value: Any) -> Any:
    """Return a vector with `value` in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def constant(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def load(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """Load a value of `kind` from an integer address plus a constant, which need not be aligned."""
    moved = builder.add(address, ir.Constant(I64, offset)) if offset else address
    value = builder.load(builder.inttoptr(moved, kind.as_pointer()))
    value.align = 1
    return value


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def parts(builder: Any, value: Any, n: int) -> list[Any]:
    """Cut a vector into n equal vectors."""
    count = value.type.count // n
    lanes = [ir.Constant(ir.VectorType(I32, count), list(range(at * count, (at + 1) * count))) for at in range(n)]
    return [builder.shuffle_vector(value, value, part) for part in lanes]


def joined(builder: Any, parts: list[Any]) -> Any:
    """Concatenate 2^n vectors, the inverse of parts."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [builder.shuffle_vector(*parts[at : at + 2], lanes) for at in range(0, len(parts), 2)]
    return parts[0]


def lookup16(context: Any, builder: Any, table: Any, indices: Any) -> Any:
    """Return table[index] for byte indices below 16; table: 16 bytes, repeated to the length of indices (32 or 64)."""
    if indices.type.count == 64 and target_has(context, "avx512bw"):
        return call(builder, "llvm.x86.avx512.pshuf.b.512", indices.type, [table, indices])
    if indices.type.count == 32 and target_has(context, "avx2"):
        return call(builder, "llvm.x86.avx2.pshuf.b", indices.type, [table, indices])
    if target_has(context, "avx2"):
        halves = zip(parts(builder, table, 2), parts(builder, indices, 2), strict=True)
        return joined(builder, [lookup16(context, builder, *half) for half in halves])
    if target_has(context, "dotprod"):
        n = indices.type.count // 16
        first = parts(builder, table, n)[0]
        found = [
            call(builder, "llvm.aarch64.neon.tbl1.v16i8", first.type, [first, part])
            for part in parts(builder, indices, n)
        ]
        return joined(builder, found)
    result = constant(indices.type, 0)
    for entry in range(16):  # no portable byte shuffle with run-time indices: sixteen selects
        value = splat(builder, indices.type, builder.extract_element(table, ir.Constant(I32, entry)))
        result = builder.select(builder.icmp_unsigned("==", indices, constant(indices.type, entry)), value, result)
    return result


def nibbles(builder: Any, line: Any) -> tuple[Any, Any]:
    """Return the low and the high nibbles of a vector of bytes, as two vectors of bytes."""
    mask = constant(line.type, 15)
    words = ir.VectorType(I16, line.type.count // 2)
    shifted = builder.lshr(builder.bitcast(line, words), constant(words, 4))  # x86 shifts words, not bytes
    return builder.and_(line, mask), builder.and_(builder.bitcast(shifted, line.type), mask)


def entries16(context: Any, builder: Any, table: Any, line: Any) -> list[Any]:
    """Return table[nibble] for the low and for the high nibbles of a vector of bytes; table: as for lookup16."""
    if line.type.count == 64 and target_has(context, "avx512vbmi"):  # uses six index bits; the 16 entries repeat
        words = ir.VectorType(I16, 32)
        high = builder.bitcast(builder.lshr(builder.bitcast(line, words), constant(words, 4)), line.type)
        return [call(builder, "llvm.x86.avx512.permvar.qi.512", line.type, [table, part]) for part in (line, high)]
    return [lookup16(context, builder, table, codes) for codes in nibbles(builder, line)]


def broadcast4(builder: Any, address: Any, offset: int, lanes: int) -> Any:
    """Return a vector of `lanes` bytes that repeats the 4 bytes at address + offset."""
    words = splat(builder, ir.VectorType(I32, lanes // 4), load(builder, address, I32, offset))
    return builder.bitcast(words, ir.VectorType(I8, lanes))


def half_to_float(context: Any, builder: Any, bits16: Any) -> Any:
    """Convert fp16 bit patterns to fp32, including subnormals, infinities and NaN.

    Without the instruction, the bits are shifted into fp32's fields, which gives 2^-112 of the value, and multiplied by
    2^112; that is right for subnormals, too.
    """
    count = bits16.type.count
    words, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
    if target_has(context, "f16c") or target_has(context, "avx512f") or target_has(context, "fullfp16"):
        return builder.fpext(builder.bitcast(bits16, ir.VectorType(F16, count)), floats)
    bits = builder.zext(bits16, words)
    magnitude = builder.shl(builder.and_(bits, constant(words, 0x7FFF)), constant(words, 13))
    sign = builder.shl(builder.and_(bits, constant(words, 0x8000)), constant(words, 16))
    scaled = builder.fmul(builder.bitcast(magnitude, floats), constant(floats, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant(words, 0x7C00 << 13))
    finite = builder.bitcast(scaled, words)
    value = builder.select(special, builder.or_(magnitude, constant(words, 0x7F800000)), finite)
    return builder.bitcast(builder.or_(value, sign), floats)


@intrinsic
def zeros(typing: Any, rows: Any) -> Any:
    """Return a tuple with as many zero vectors as the tuple `rows` has elements."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_tuple(builder, signature.return_type, [constant(F32X16, 0.0)] * rows.count)

    return types.UniTuple(f32x16, rows.count)(rows), codegen


@intrinsic
def store_rows(typing: Any, values: Any, factor: Any, address: Any, stride: Any) -> Any:
    """Store vector t of a tuple, multiplied by the fp32 factor, at address + t * stride bytes, for every t."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, target = cgutils.unpack_tuple(builder, arguments[0], values.count), arguments[2]
        vector = rows[0].type
        scale = splat(builder, vector, arguments[1])
        for value in rows:
            builder.store(builder.fmul(value, scale), builder.inttoptr(target, vector.as_pointer())).align = 4
            target = builder.add(target, arguments[3])
        return context.get_dummy_value()

    return types.void(values, types.float32, types.intp, types.intp), codegen


@intrinsic
def pair_sums(typing: Any, values: Any) -> Any:
    """Return the sums of vectors 0 and 1, 2 and 3 and so on of a tuple; a tuple of one vector unchanged."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = cgutils.unpack_tuple(builder, arguments[0], values.count)
        sums = [builder.fadd(*pair) for pair in zip(rows[::2], rows[1::2], strict=False)]
        return context.make_tuple(builder, signature.return_type, sums or rows)

    return types.UniTuple(values.dtype, max(1, values.count // 2))(values), codegen


def _prefetch(locality: int, name: str, meaning: str) -> Any:
    """Return an intrinsic that prefetches a cache line into cache level 4 - locality and higher levels."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I8.as_pointer())
        flags = [ir.Constant(I32, value) for value in (0, locality, 1)]  # read, data
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0"), [pointer, *flags])
        return context.get_dummy_value()

    def function(typing: Any, address: Any) -> Any:
        return types.void(types.intp), codegen

    function.__name__, function.__doc__ = name, meaning
    return intrinsic(function)


# Non-temporal: weights that stream through leave other data in the caches. SmolLM2 writes 8 % more tokens per second on
# one thread than with a prefetch into all caches, and as many on two (Zen 4, 2026-11-29); prompts are as fast.
prefetch = _prefetch(0, "prefetch", "Prefetches the cache line at `address` for one use. Any address is safe.")
prefetch_far = _prefetch(2, "prefetch_far", "Prefetches into L2, for data that would be evicted from L1 before use.")


@intrinsic
def word(typing: Any, address: Any, index: Any) -> Any:
    """Load the int64 at address + 8 * index, such as an argument of a chunk function."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = builder.add(arguments[0], builder.mul(arguments[1], ir.Constant(I64, 8)))
        return load(builder, at, I64)

    return types.int64(types.intp, types.intp), codegen


@intrinsic
def nonzero_lanes(typing: Any, value: Any) -> Any:
    """Return an integer whose bit i is set if lane i is not 0. NaN counts as not 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        test = builder.fcmp_unordered("!=", arguments[0], constant(F32X16, 0.0))
        return builder.zext(builder.bitcast(test, I16), I64)

    return types.int64(f32x16), codegen


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Any:
    """Return the index of the lowest set bit of a nonzero int64."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, "llvm.cttz.i64", I64, [arguments[0], ir.Constant(ir.IntType(1), 1)])

    return types.int64(types.int64), codegen
