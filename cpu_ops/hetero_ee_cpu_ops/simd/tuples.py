"""Several vectors of 16 lanes at once: the inner steps of attention, and their sums side by side.

A tuple of vectors stays in registers; each of its vectors is an independent chain of additions, so that one addition's
latency hides another's.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_ee_cpu_ops.simd.bytes import F32, F32X16, I64, f32x16, load, splat
from hetero_ee_cpu_ops.simd.floats import ELEMENTS, fold, fused, lane_mask, loader, masked_load, pointer


@intrinsic
def add_products(typing: Any, totals: Any, query: Any, keys: Any, stride: Any, element: Any) -> Any:
    """totals[t] += 16 features of the query (fp32 at `query`) x those of key t (at keys + t * stride elements)."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        features, at, results = load(builder, arguments[1], F32X16), arguments[2], []
        step = builder.mul(arguments[3], ir.Constant(I64, element.bitwidth // 8))
        for total in cgutils.unpack_tuple(builder, arguments[0], totals.count):
            results.append(fused(context, builder, convert(load(builder, at, kind)), features, total))
            at = builder.add(at, step)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, types.intp, types.intp, types.intp, element), codegen


@intrinsic
def add_products_lanes(typing: Any, totals: Any, query: Any, keys: Any, stride: Any, count: Any, element: Any) -> Any:
    """The same for the last `count` features of a head."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        mask = lane_mask(builder, ir.Constant(I64, 0), arguments[4])
        features, at, results = masked_load(builder, arguments[1], F32X16, mask), arguments[2], []
        step = builder.mul(arguments[3], ir.Constant(I64, element.bitwidth // 8))
        for total in cgutils.unpack_tuple(builder, arguments[0], totals.count):
            key = convert(masked_load(builder, at, kind, mask))
            results.append(fused(context, builder, key, features, total))
            at = builder.add(at, step)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, types.intp, types.intp, types.intp, types.intp, element), codegen


@intrinsic
def store_sums(typing: Any, totals: Any, address: Any) -> Any:
    """The sum of each vector's lanes, side by side from `address` on; summed as by lane_sum, however many they are."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = list(cgutils.unpack_tuple(builder, arguments[0], totals.count))
        sums = fold(builder, vectors, builder.fadd)
        builder.store(sums, pointer(builder, arguments[1], sums.type)).align = 4
        return context.get_dummy_value()

    return types.void(totals, types.intp), codegen


@intrinsic
def load_scaled(typing: Any, rows: Any, address: Any, factor: Any) -> Any:
    """For each element of the tuple `rows`, the next 16 fp32 values at `address`, times factor."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factor_ = splat(builder, F32X16, arguments[2])
        values = [builder.fmul(load(builder, arguments[1], F32X16, 64 * i), factor_) for i in range(rows.count)]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(f32x16, rows.count)(rows, types.intp, types.float32), codegen


@intrinsic
def add_weighted(typing: Any, totals: Any, weight: Any, values: Any, element: Any) -> Any:
    """totals[t] += the fp32 at `weight` x values 16t..16t+15 at `values`."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        weight_ = splat(builder, F32X16, load(builder, arguments[1], F32))
        results = []
        for number, total in enumerate(cgutils.unpack_tuple(builder, arguments[0], totals.count)):
            value = convert(load(builder, arguments[2], kind, 2 * number * element.bitwidth))
            results.append(fused(context, builder, value, weight_, total))
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, types.intp, types.intp, element), codegen


@intrinsic
def store_vectors(typing: Any, values: Any, address: Any) -> Any:
    """Stores the tuple's vectors side by side."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = arguments[1]
        for value in cgutils.unpack_tuple(builder, arguments[0], values.count):
            builder.store(value, pointer(builder, at, F32X16)).align = 4
            at = builder.add(at, ir.Constant(I64, 64))
        return context.get_dummy_value()

    return types.void(values, types.intp), codegen
