"""Dot products of 16 rows (rows.py) with activations in one unit of 64 columns: the inner step of a sparse up.

The rows are apart in memory. Their words of four columns are transposed in registers so that a lane is a row, as in a
tile: arithmetic, order and bits of the sums are those of tile_group.py. Unpacked rows serve several tokens.
"""

from collections.abc import Iterator
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
    I64,
    call,
    constant,
    entries16,
    half_to_float,
    joined,
    load,
    splat,
)
from hetero_ee_cpu_ops.simd.floats import pointer
from hetero_ee_cpu_ops.tile_group import Emitter
from hetero_ee_cpu_ops.tile_kind import CODEBOOK, NARROW, adds_in_16_bits, has_wide_registers

I32X8 = ir.VectorType(I32, 8)
UNPACKED_UNIT_BYTES = 16 * 64  # of 16 rows
COLUMN_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of a group's words, matching the order in which quantize.py sums codes


def pick(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def zipped(builder: Any, first: Any, second: Any) -> list[Any]:
    """Interleave the lower and the upper halves of each 16 bytes, as x86 and Arm instructions do."""
    count, half = first.type.count, 64 // first.type.element.width
    halves = []
    for begin in (0, half):
        lanes = [at + n for at in range(begin, count, 2 * half) for lane in range(half) for n in (lane, count + lane)]
        halves.append(pick(builder, first, second, lanes))
    return halves


def _transposed(context: Any, builder: Any, rows: list[Any]) -> list[list[Any]]:
    """Transpose 16 rows of 8 words to 8 vectors with a lane per row; to 2 x 8 if registers hold only 8 rows."""
    if has_wide_registers(context):
        pairs = [[joined(builder, [rows[at + n], rows[at + n + 4]]) for at in (0, 8)] for n in range(4)]
        return [_transposed_pairs(builder, pairs)]
    return [_transposed_pairs(builder, [[rows[at + n], rows[at + n + 4]] for n in range(4)]) for at in (0, 8)]


def _transposed_pairs(builder: Any, pairs: list[list[Any]]) -> list[Any]:
    """Transpose pairs to words 0 to 7 with a lane per row. Pair n holds rows n, n + 4 and so on, 8 words each."""
    words = []
    for half in range(2):
        lanes = [4 * at + n for at in range(half, pairs[0][0].type.count // 2, 2) for n in range(4)]
        quarters = [pick(builder, first, second, lanes) for first, second in pairs]
        twos = [zipped(builder, *quarters[at : at + 2]) for at in (0, 2)]
        longs = ir.VectorType(I64, quarters[0].type.count // 2)
        for both in zip(*twos, strict=True):
            words += zipped(builder, *(builder.bitcast(part, longs) for part in both))
    return [builder.bitcast(pair, pairs[0][0].type) for pair in words]


def _operands(emitter: Emitter, words: list[Any], table: Any, half: int) -> Iterator[tuple[list[Any], int]]:
    """Yield a group's entries, from low or high nibbles, four columns at a time, with the first column's index."""
    bytes_type = ir.VectorType(I8, emitter.lanes)
    entries = load(emitter.builder, table, bytes_type, 64 if emitter.signed else 0)
    for number in COLUMN_ORDER:
        line = emitter.builder.bitcast(words[number], bytes_type)
        yield [entries16(emitter.context, emitter.builder, entries, line)[half]], 4 * number


def _emitter(context: Any, builder: Any) -> Emitter:
    return Emitter(context, builder, NARROW if adds_in_16_bits(context) else CODEBOOK, 1)


def _unit_operands(emitter: Emitter, lines: Any, here: Any, table: Any) -> Iterator[Iterator[tuple[list[Any], int]]]:
    """Yield the operands of both groups of a unit; for the second 8 rows too if registers hold only 8."""
    builder = emitter.builder
    rows = [load(builder, builder.add(load(builder, lines, I64, 8 * row), here), I32X8) for row in range(16)]
    for words in _transposed(emitter.context, builder, rows):
        for half in range(2):
            yield _operands(emitter, words, table, half)


def _stored_operands(emitter: Emitter, address: Any) -> Iterator[Iterator[tuple[list[Any], int]]]:
    """Yield what _unit_operands yields, read from where unpack_unit stored it."""

    def operands(first: int) -> Iterator[tuple[list[Any], int]]:
        for at, number in enumerate(COLUMN_ORDER):
            kind = ir.VectorType(I8, emitter.lanes)
            yield [load(emitter.builder, address, kind, emitter.lanes * (first + at))], 4 * number

    for first in range(0, UNPACKED_UNIT_BYTES // emitter.lanes, 8):
        yield operands(first)


def _added(
    emitter: Emitter, totals: list[Any], each_operands: Any, scales: Any, inputs: list[Any], r: Any
) -> list[Any]:
    """Add the dot products of a unit's two groups to the totals."""
    context, builder, tokens = emitter.context, emitter.builder, list(range(len(totals)))
    steps = [builder.mul(r, ir.Constant(I64, n)) for n in (32, 4, 8 if emitter.kind == NARROW else 4)]
    at = [inputs, [builder.add(*pair) for pair in zip(inputs, steps, strict=True)]]
    sums: list[list[list[Any]]] = [[], []]
    for number, operands in enumerate(each_operands):
        x, _, offset = at[number % 2]
        if has_wide_registers(context):  # registers hold all operands, so token by token
            held = list(operands)
            found = [emitter.group_sums(iter(held), x, offset, [token])[0][0] for token in tokens]
        else:
            found = [parts[0] for parts in emitter.group_sums(operands, x, offset, tokens)]
        sums[number % 2].append(found)
    for half in range(2):
        weights = load(builder, scales, F32X16, 64 * half)
        for token, parts in enumerate(zip(*sums[half], strict=True)):
            factor = builder.fmul(weights, splat(builder, F32X16, load(builder, at[half][1], F32, 4 * token)))
            value = builder.sitofp(joined(builder, list(parts)), F32X16)
            totals[token] = call(builder, "llvm.fma.v16f32", F32X16, [value, factor, totals[token]])
    return totals


@intrinsic
def add_unit(
    typing: Any, totals: Any, lines: Any, here: Any, table: Any, scales: Any, x: Any, scale: Any, offset: Any, r: Any
) -> Any:
    """Add the products of two groups of 16 rows to totals[t] (f32x16) for every token t, as add_group does.

    Args:
        lines: address of the rows' addresses.
        here: byte offset of the unit in a row.
        table: RowMatrix's table.
        scales: address of the first group's 16 fp32 scales, followed by the second's.
        x, scale, offset: as for add_group, with r tokens side by side.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals_, lines_, here_, table_, scales_, *inputs, r_ = arguments
        emitter = _emitter(context, builder)
        operands = _unit_operands(emitter, lines_, here_, table_)
        results = _added(emitter, list(cgutils.unpack_tuple(builder, totals_)), operands, scales_, inputs, r_)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, *([types.intp] * 8)), codegen


@intrinsic
def unpack_unit(typing: Any, lines: Any, here: Any, table: Any, out: Any) -> Any:
    """Unpack a unit of 16 rows to `out` (UNPACKED_UNIT_BYTES bytes), for add_unpacked_unit. See add_unit."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lines_, here_, table_, out_ = arguments
        for operands in _unit_operands(_emitter(context, builder), lines_, here_, table_):
            for (operand,), _ in operands:
                builder.store(operand, pointer(builder, out_, operand.type)).align = 1
                out_ = builder.add(out_, ir.Constant(I64, operand.type.count))
        return context.get_dummy_value()

    return types.void(*([types.intp] * 4)), codegen


@intrinsic
def add_unpacked_unit(
    typing: Any, totals: Any, operands: Any, scales: Any, x: Any, scale: Any, offset: Any, r: Any
) -> Any:
    """Add a unit as add_unit does, from the operands that unpack_unit stored at `operands`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals_, operands_, scales_, *inputs, r_ = arguments
        emitter = _emitter(context, builder)
        stored = _stored_operands(emitter, operands_)
        results = _added(emitter, list(cgutils.unpack_tuple(builder, totals_)), stored, scales_, inputs, r_)
        return context.make_tuple(builder, signature.return_type, results)

    return totals(totals, *([types.intp] * 6)), codegen


@intrinsic
def unpack_scales(typing: Any, lines: Any, here: Any, n_units: Any, out: Any) -> Any:
    """Convert 16 rows' scales of up to 8 units to fp32 at `out`, group by group. No other scales are read.

    `lines` is the address of the addresses of the rows' scales, `here` the byte offset of the first unit in them.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lines_, here_, n_units_, out_ = arguments
        limit = splat(builder, I32X8, builder.trunc(n_units_, I32))
        mask = builder.icmp_signed("<", ir.Constant(I32X8, list(range(8))), limit)
        rows = []
        for row in range(16):
            address = pointer(builder, builder.add(load(builder, lines_, I64, 8 * row), here_), I32X8)
            operands = [address, ir.Constant(I32, 1), mask, constant(I32X8, 0)]
            rows.append(call(builder, "llvm.masked.load.v8i32.p0", I32X8, operands))
        for part, words in enumerate(_transposed(context, builder, rows)):
            for number, word in enumerate(words):
                for half in range(2):
                    shifted = builder.lshr(word, constant(word.type, 16 * half))
                    value = half_to_float(context, builder, builder.trunc(shifted, ir.VectorType(I16, word.type.count)))
                    at = builder.add(out_, ir.Constant(I64, 64 * (2 * number + half) + 32 * part))
                    builder.store(value, pointer(builder, at, value.type)).align = 4
        return context.get_dummy_value()

    return types.void(*([types.intp] * 4)), codegen


@intrinsic
def gate_rows(typing: Any, totals: Any, factor: Any, address: Any, stride: Any) -> Any:
    """Multiply 16 gates per token, at address + t * stride, by totals[t] x factor, in place. Gates of 0 become 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        totals_, factor_, at, stride_ = arguments
        zero, factor_ = constant(F32X16, 0.0), splat(builder, F32X16, factor_)
        for total in cgutils.unpack_tuple(builder, totals_, totals.count):
            gate = load(builder, at, F32X16)
            product = builder.fmul(gate, builder.fmul(total, factor_))
            value = builder.select(builder.fcmp_unordered("!=", gate, zero), product, zero)
            builder.store(value, pointer(builder, at, F32X16)).align = 4
            at = builder.add(at, stride_)
        return context.get_dummy_value()

    return types.void(totals, types.float32, types.intp, types.intp), codegen
