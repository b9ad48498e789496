"""Quantizes weights to a codebook of 16 entries, with the same bits as torch in hetero_ee/weights/codebook.py.

A group is 32 weights with one scale. 16 groups are computed at a time, transposed so that a lane is a group. A sum over
a group adds columns l, l + 8, l + 16 and l + 24 for each l of 0 to 7, and then these eight in order, as torch's sums do
with AVX2. The 18 trials of a weight's scale take 8 ns (one Zen 4 thread, 2026-11-27).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hetero_ee_cpu_ops.jit.kernel_files import inner
from hetero_ee_cpu_ops.jit.lazy import array_in, array_out, entry
from hetero_ee_cpu_ops.simd.bytes import F32, F32X16, I32X16, call, constant, f32x16, load, splat, target_has
from hetero_ee_cpu_ops.simd.floats import (
    Lanes,
    add,
    load16,
    multiply,
    operation,
    pointer,
    read_float,
    scratch,
    spread,
    store16,
    write_float,
)

GROUP, LANES, TILE_BYTES = 32, 16, 256
COLUMN_BYTES = 4 * LANES  # of 16 groups' values of one column
ZERO = np.float32(0)
LEAST_NORM = np.float32(1e-30)
# A table: 16 lower bounds of the entries' intervals, the first one unused; the entries; their indices 0 to 15.
ENTRIES, INDICES, TABLE_LENGTH = 64, 128, 48
READ_1, READ_2, WRITE_1 = array_in(types.float32, 1), array_in(types.float32, 2), array_out(types.float32, 1)


def _larger(a: Lanes, b: Lanes) -> Lanes:
    return a.where("==", a, b.magnitude().where("<=", a.magnitude(), a, b), a)


divide = operation(2, lambda a, b: a / b, "divide", "a / b.")
inverse_or_0 = operation(1, lambda a: a.where("==", 0.0, 0.0, a.constant(1.0) / a), "inverse_or_0", "1 / a; 0 for 0.")
at_least = operation(2, lambda a, b: a.where("<", b, b, a), "at_least", "The greater; a if either is NaN.")
larger = operation(2, _larger, "larger", "b if |b| > |a| or b is NaN, else a; a if a is NaN.")


def _nearest(context: Any, builder: Any, target: Any, table: Any, values: int) -> Any:
    """Return the values (at byte offset `values` of the table) of the targets' intervals; the first for NaN."""
    if target_has(context, "avx512f"):  # a binary search by permutations: half the instructions
        bounds, found = load(builder, table, F32X16), constant(I32X16, 0)
        for bit in (8, 4, 2, 1):
            tried = builder.or_(found, constant(I32X16, bit))
            bound = call(builder, "llvm.x86.avx512.permvar.sf.512", F32X16, [bounds, tried])
            found = builder.select(builder.fcmp_ordered(">=", target, bound), tried, found)
        entries = load(builder, table, F32X16, values)
        return call(builder, "llvm.x86.avx512.permvar.sf.512", F32X16, [entries, found])
    result = splat(builder, F32X16, load(builder, table, F32, values))
    for index in range(1, 16):
        bound, value = (splat(builder, F32X16, load(builder, table, F32, at + 4 * index)) for at in (0, values))
        result = builder.select(builder.fcmp_ordered(">=", target, bound), value, result)
    return result


@intrinsic(prefer_literal=True)
def nearest(typing: Any, target: Any, table: Any, values: Any) -> Any:
    """Return the codebook entries nearest to 16 targets (`values` = ENTRIES), or their indices as fp32 (INDICES)."""
    if not isinstance(values, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _nearest(context, builder, arguments[0], arguments[1], values.literal_value)

    return f32x16(f32x16, types.intp, values), codegen


@intrinsic
def store_tile(typing: Any, columns: Any, inverse: Any, table: Any, out: Any) -> Any:
    """Store an int4 tile: the codes of 16 transposed groups after multiplication by their inverse scales."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        columns_, inverse_, table_, out_ = arguments
        for line in range(4):
            word = constant(I32X16, 0)
            for byte in range(4):
                for half in range(2):
                    value = load(builder, columns_, F32X16, COLUMN_BYTES * (16 * half + 4 * line + byte))
                    index = _nearest(context, builder, builder.fmul(value, inverse_), table_, INDICES)
                    code = builder.shl(builder.fptosi(index, I32X16), constant(I32X16, 8 * byte + 4 * half))
                    word = builder.or_(word, code)
            at = builder.add(out_, ir.Constant(out_.type, 64 * line))
            builder.store(word, pointer(builder, at, I32X16)).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, f32x16, types.intp, types.intp), codegen


@intrinsic
def keep_better(typing: Any, gain: Any, scale: Any, best_gain: Any, best_scale: Any) -> Any:
    """Return `scale` in lanes where `gain` exceeds `best_gain`, else `best_scale`, also for NaN."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gain_, scale_, best_gain_, best_scale_ = (Lanes(context, builder, each) for each in arguments)
        return gain_.where(">", best_gain_, scale_, best_scale_).value

    return f32x16(*[f32x16] * 4), codegen


@inner
def _transpose(groups: int, stride: int, columns: int) -> None:
    """Transpose 16 groups, `stride` bytes apart, to 32 vectors at `columns` with a lane per group."""
    for column in range(GROUP):
        for lane in range(LANES):
            write_float(read_float(groups + lane * stride + 4 * column), columns + COLUMN_BYTES * column + 4 * lane)


@inner
def _best_scales(columns: int, table: int, factors: int, n_factors: int) -> Any:
    """Return the least-squares scale of the best trial for each of 16 transposed groups."""
    largest = load16(columns, ZERO)
    for column in range(1, GROUP):
        largest = larger(largest, load16(columns + COLUMN_BYTES * column, ZERO))
    lowest, highest = spread(read_float(table + ENTRIES)), spread(read_float(table + ENTRIES + 60))
    plain = divide(largest, lowest)
    mirrored = multiply(plain, divide(lowest, highest))
    best_scale, best_gain = plain, spread(ZERO)
    for trial in range(2 * n_factors):
        anchor = mirrored if trial & 1 else plain
        inverse = inverse_or_0(multiply(anchor, spread(read_float(factors + 4 * (trial // 2)))))
        product = norm = spread(ZERO)
        for eighth in range(8):
            part = squares = spread(ZERO)
            for column in range(eighth, GROUP, 8):
                value = load16(columns + COLUMN_BYTES * column, ZERO)
                chosen = nearest(multiply(value, inverse), table, ENTRIES)
                part, squares = add(part, multiply(value, chosen)), add(squares, multiply(chosen, chosen))
            product, norm = add(product, part), add(norm, squares)
        norm = at_least(norm, spread(LEAST_NORM))
        gain = divide(multiply(product, product), norm)
        best_scale = keep_better(gain, divide(product, norm), best_gain, best_scale)
        best_gain = keep_better(gain, gain, best_gain, best_gain)
    return best_scale


@entry(types.int64(READ_2, READ_1, READ_1, WRITE_1), nogil=True)
def _search(groups: Any, table: Any, factors: Any, out: Any) -> int:
    """Search each group's best scale. Return 0, or 1 if a shape is wrong."""
    n = groups.shape[0]
    if groups.shape[1] != GROUP or n % LANES or out.size != n or table.size != TABLE_LENGTH:
        return 1
    columns = scratch(2048)
    for first in range(0, n, LANES):
        _transpose(groups.ctypes.data + 4 * GROUP * first, 4 * GROUP, columns)
        best = _best_scales(columns, table.ctypes.data, factors.ctypes.data, factors.size)
        store16(best, out.ctypes.data + 4 * first)
    return 0


@entry(types.int64(READ_2, READ_1, READ_1, WRITE_1), nogil=True)
def _fit(groups: Any, table: Any, factors: Any, sums: Any) -> int:
    """Add each weight to the sums of its code (see fit_sums). Return 0, or 1 if a shape is wrong."""
    n = groups.shape[0]
    if groups.shape[1] != GROUP or n % LANES or sums.size != 32 or table.size != TABLE_LENGTH:
        return 1
    columns, codes, scales = scratch(2048), scratch(2048), scratch(64)
    for first in range(0, n, LANES):
        _transpose(groups.ctypes.data + 4 * GROUP * first, 4 * GROUP, columns)
        best = _best_scales(columns, table.ctypes.data, factors.ctypes.data, factors.size)
        store16(best, scales)
        inverse = inverse_or_0(best)
        for column in range(GROUP):
            target = multiply(load16(columns + COLUMN_BYTES * column, ZERO), inverse)
            store16(nearest(target, table.ctypes.data, INDICES), codes + COLUMN_BYTES * column)
        for lane in range(LANES):
            scale = read_float(scales + 4 * lane)
            for column in range(GROUP):
                code = np.intp(read_float(codes + COLUMN_BYTES * column + 4 * lane))
                sums[code] += groups[first + lane, column] * scale
                sums[16 + code] += scale * scale
    return 0


@entry(types.int64(array_in(types.float32, 3), READ_2, READ_1, array_out(types.uint8, 3)), nogil=True)
def _encode(groups: Any, inverse: Any, table: Any, tiles: Any) -> int:
    """Encode groups as int4 tiles. Return 0, or 1 if a shape is wrong."""
    n_rows, n_groups, n_columns = groups.shape
    if n_columns != GROUP or n_rows % LANES or inverse.shape != (n_rows, n_groups) or table.size != TABLE_LENGTH:
        return 1
    if tiles.shape != (n_rows // LANES, n_groups, TILE_BYTES):
        return 1
    columns, factors = scratch(2048), scratch(64)
    for block in range(tiles.shape[0]):
        for group in range(n_groups):
            at = groups.ctypes.data + 4 * GROUP * (LANES * block * n_groups + group)
            _transpose(at, 4 * GROUP * n_groups, columns)
            for lane in range(LANES):
                write_float(inverse[LANES * block + lane, group], factors + 4 * lane)
            out = tiles.ctypes.data + TILE_BYTES * (block * n_groups + group)
            store_tile(columns, load16(factors, ZERO), table.ctypes.data, out)
    return 0


def search_scales(groups: Any, table: Any, factors: Any) -> Any:
    """Return each group's best scale, fp32 (n,).

    Args:
        groups: fp32 (n, 32), n a multiple of 16.
        table: fp32 (48,): an unused number; the beginnings of the intervals of entries 1 to 15; the entries, ascending;
            the numbers 0 to 15.
        factors: fp32, the trial scales relative to the two scales that map the largest weight to an end of the
            codebook.

    Raises:
        ValueError: if a shape, dtype or layout does not fit.
    """
    out = np.empty(len(groups), np.float32)
    if _search(groups, table, factors, out):
        raise ValueError(f"Groups {groups.shape} and table {table.shape} do not fit.")
    return out


def fit_sums(groups: Any, table: Any, factors: Any) -> Any:
    """Return the sums of weight x scale and of squared scales for each code, fp32 (32,), for Lloyd's algorithm.

    Arguments and errors: as for search_scales.
    """
    sums = np.zeros(32, np.float32)
    if _fit(groups, table, factors, sums):
        raise ValueError(f"Groups {groups.shape} and table {table.shape} do not fit.")
    return sums


def encode_int4(groups: Any, inverse: Any, table: Any) -> Any:
    """Encode weights as int4 tiles, uint8 (n / 16, g, 256).

    Args:
        groups: fp32 (n, g, 32), n a multiple of 16.
        inverse: fp32 (n, g), the groups' inverse scales.
        table: as for search_scales.

    Raises:
        ValueError: if a shape, dtype or layout does not fit.
    """
    tiles = np.empty((groups.shape[0] // LANES, groups.shape[1], TILE_BYTES), np.uint8)
    if _encode(groups, inverse, table, tiles):
        raise ValueError(f"Groups {groups.shape}, inverse scales {inverse.shape} and table {table.shape} do not fit.")
    return tiles
