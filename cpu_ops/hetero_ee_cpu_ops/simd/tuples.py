"""Tuples of 16-lane vectors that stay in registers: tiles for attention's products and weighted sums.

Each vector is an independent chain of additions, so that one addition's latency hides another's. A tile has len(rows)
rows; its vectors are stored row by row.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_ee_cpu_ops.simd.bytes import F32, F32X16, I32, I64, f32x16, load, splat
from hetero_ee_cpu_ops.simd.floats import ELEMENTS, fold, fused, loader, pointer


@intrinsic
def add_products(
    typing: Any, totals: Any, rows: Any, queries: Any, stride: Any, keys: Any, step: Any, element: Any
) -> Any:
    """Add 16 features of fp32 query `row` x those of key k to totals[row, k], for a tile of len(rows) x keys.

    queries, keys: addresses of the first one's features; stride, step: bytes to the next query and key.
    """
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        vectors, results = list(cgutils.unpack_tuple(builder, arguments[0], totals.count)), []
        query_at, key_at, keys_ = arguments[2], arguments[4], []
        for _ in range(totals.count // rows.count):
            keys_.append(convert(load(builder, key_at, kind)))
            key_at = builder.add(key_at, arguments[5])
        for row in range(rows.count):
            query = load(builder, query_at, F32X16)
            for number, key in enumerate(keys_):
                results.append(fused(context, builder, key, query, vectors[row * len(keys_) + number]))
            query_at = builder.add(query_at, arguments[3])
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, rows, types.intp, types.intp, types.intp, types.intp, element), codegen


@intrinsic
def store_sums(typing: Any, totals: Any, rows: Any, address: Any, stride: Any) -> Any:
    """Store the lane_sum of each vector: a row's sums side by side at address + row * stride."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums = fold(builder, list(cgutils.unpack_tuple(builder, arguments[0], totals.count)), builder.fadd)
        target, n_keys = arguments[2], totals.count // rows.count
        for row in range(rows.count):
            lanes = [16 // totals.count * (row * n_keys + key) for key in range(n_keys)]
            chosen = builder.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(I32, n_keys), lanes))
            builder.store(chosen, pointer(builder, target, chosen.type)).align = 4
            target = builder.add(target, arguments[3])
        return context.get_dummy_value()

    return types.void(totals, rows, types.intp, types.intp), codegen


@intrinsic
def add_weighted(typing: Any, totals: Any, rows: Any, weights: Any, stride: Any, values: Any, element: Any) -> Any:
    """Add the fp32 at weights + row * stride x values 16t..16t+15 at `values` to totals[row, t]."""
    if element not in ELEMENTS:
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, convert = loader(element, context, builder)
        vectors, results = list(cgutils.unpack_tuple(builder, arguments[0], totals.count)), []
        n_vectors, at = totals.count // rows.count, arguments[2]
        step = 2 * element.bitwidth  # bytes of 16 values
        values_ = [convert(load(builder, arguments[4], kind, step * number)) for number in range(n_vectors)]
        for row in range(rows.count):
            weight = splat(builder, F32X16, load(builder, at, F32))
            for number, value in enumerate(values_):
                results.append(fused(context, builder, value, weight, vectors[row * n_vectors + number]))
            at = builder.add(at, arguments[3])
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, rows, types.intp, types.intp, types.intp, element), codegen


@intrinsic
def load_tile(typing: Any, cells: Any, rows: Any, address: Any, stride: Any) -> Any:
    """Load len(cells) vectors of fp32: a row's vectors side by side from address + row * stride."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, values = arguments[2], []
        for _ in range(rows.count):
            values += [load(builder, at, F32X16, 64 * number) for number in range(cells.count // rows.count)]
            at = builder.add(at, arguments[3])
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(f32x16, cells.count)(cells, rows, types.intp, types.intp), codegen


@intrinsic
def store_tile(typing: Any, values: Any, rows: Any, address: Any, stride: Any) -> Any:
    """Store vectors in the layout that load_tile reads."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, vectors = arguments[2], list(cgutils.unpack_tuple(builder, arguments[0], values.count))
        n_vectors = values.count // rows.count
        for row in range(rows.count):
            for number, value in enumerate(vectors[row * n_vectors : (row + 1) * n_vectors]):
                target = builder.add(at, ir.Constant(I64, 64 * number))
                builder.store(value, pointer(builder, target, F32X16)).align = 4
            at = builder.add(at, arguments[3])
        return context.get_dummy_value()

    return types.void(values, rows, types.intp, types.intp), codegen
