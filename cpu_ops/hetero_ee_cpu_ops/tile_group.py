"""One group of one row block, for several rows of activations: the innermost step of the tile matmuls, as machine code.

For 16 rows n of W, 32 columns k, and every row t:  total[t, n] += s[n] a[t] (sum over k of entry[n, k] q[t, k])
with q the int8 codes of the activation and a their scale. The integer sum is exact, so every instruction set gives the
same bits. Four kinds of tile, told apart by the length of a tuple, because a length is part of a type:

LINEAR    int4, entry = code - 8.             CODEBOOK  int4, entry = table[code].
BYTES     int8, entry = the byte.             NARROW    as CODEBOOK, no entry beyond -32 .. 32; on AVX2 alone.

VNNI multiplies unsigned by signed bytes: entries are moved up by z (8, or 128) and -z sum(q) is where the sum begins.
Arm's dot product takes two signed bytes. AVX2's multiply of unsigned by signed adds two products in 16 bits, and
widening such sums costs as much as making them. Codes below 16 are widened once a group: 8 x 2 x 15 x 127 = 30,480
fits. Narrow entries, moved up by 32, are widened after four: such a sum begins at -32 times the sum of its 8 codes, may
wrap around on its way, and ends within 4 x 2 x 32 x 127 = 32,512. Full bytes go through |entry| times q with the sign
of entry and are widened each. Against linear codes, m = 8, the weights in L2: narrow entries take 1.11 times as long,
full bytes 1.67 times (Sapphire Rapids running AVX2 code, 2026-11-23).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hetero_ee_cpu_ops.simd.bytes import (
    F32,
    I8,
    I16,
    I32,
    broadcast4,
    call,
    constant,
    f32x16,
    half_to_float,
    joined,
    load,
    lookup16,
    nibbles,
    quarters,
    splat,
    target_has,
)

LINEAR, CODEBOOK, BYTES, NARROW = (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)
LINEAR_CODEBOOK = tuple(range(-8, 8))
NARROW_LIMIT = 32  # the largest magnitude of an entry that lets four products be added up in 16 bits


def tile_kind(context: Any, codebook: tuple[int, ...] | None) -> tuple[int, ...]:
    """Which kind the tiles of this codebook are to the JIT target; None: int8 tiles."""
    if codebook is None:
        return BYTES
    if codebook == LINEAR_CODEBOOK:
        return LINEAR
    is_narrow = max(map(abs, codebook)) <= NARROW_LIMIT
    return NARROW if is_narrow and adds_in_16_bits(context) else CODEBOOK


def adds_in_16_bits(context: Any) -> bool:
    """Whether the JIT target's products of bytes are added up in 16 bits: AVX2 without a dot product of bytes."""
    has_dot = target_has(context, "avx512vnni") or target_has(context, "avxvnni")
    return target_has(context, "avx2") and not has_dot


def has_wide_registers(context: Any) -> bool:
    """Whether one register holds 16 rows; where it holds 8, a row block is taken in halves."""
    return target_has(context, "avx512vnni") or not target_has(context, "avx2")


class _Emitter:
    """Emits the step for one target, one kind of tile, and 16 rows of it or 8."""

    def __init__(self, context: Any, builder: Any, kind: int, n_weight_rows: int) -> None:
        self.context, self.builder, self.kind, self.lanes = context, builder, kind, 4 * n_weight_rows
        self.has_vnni = target_has(context, "avx512vnni")
        self.has_vnni_256 = target_has(context, "avxvnni") and not self.has_vnni
        self.has_avx2 = adds_in_16_bits(context)
        self.has_neon_dot = target_has(context, "dotprod")
        # Where both operands are signed, entries stay as they are and need no offset (a code below 16 is both).
        self.signed = (self.has_avx2 or self.has_neon_dot) and kind in (len(CODEBOOK), len(BYTES))

    def operands(self, tile: Any, table: Any) -> list[tuple[Any, int]]:
        """The weights as bytes, four columns each, with the first column's index."""
        bytes_type = ir.VectorType(I8, self.lanes)
        if self.kind == len(BYTES):
            flip = constant(bytes_type, 0 if self.signed else -128)
            lines = [load(self.builder, tile, bytes_type, 64 * line) for line in range(8)]
            return [(self.builder.xor(line, flip), 4 * index) for index, line in enumerate(lines)]
        entries = None
        if self.kind != len(LINEAR):
            entries = load(self.builder, table, bytes_type, 64 if self.signed else 0)
        found = []
        for line in range(4):
            codes = nibbles(self.builder, load(self.builder, tile, bytes_type, 64 * line))
            for half, code in enumerate(codes):
                weight = code if entries is None else lookup16(self.context, self.builder, entries, code)
                found.append((weight, 4 * line + 16 * half))
        return found

    def group_sum(self, operands: list[tuple[Any, int]], x: Any, offset: Any, row: int) -> Any:
        """The exact sum over the group for one row of activations, int32 by weight row."""
        builder, sums_type = self.builder, ir.VectorType(I32, self.lanes // 4)
        if self.kind == len(NARROW):
            return self._narrow_sum(operands, x, offset, row)
        start = (
            constant(sums_type, 0) if self.signed else splat(builder, sums_type, load(builder, offset, I32, 4 * row))
        )
        if self.has_avx2 and not self.signed:
            return builder.add(start, self._sum16(operands, x, 32 * row, constant(ir.VectorType(I16, 16), 0)))
        for weight, column in operands:
            start = self._dot4(start, weight, broadcast4(builder, x, 32 * row + column, self.lanes))
        return start

    def _dot4(self, total: Any, weight: Any, x: Any) -> Any:
        builder = self.builder
        if self.has_vnni:
            return call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, weight, x])
        if self.has_vnni_256:
            return call(builder, "llvm.x86.avx512.vpdpbusd.256", total.type, [total, weight, x])
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
        """Arm's registers hold 4 rows x 4 columns: four dot products."""
        parts = zip(*(quarters(self.builder, value) for value in (total, weight, x)), strict=True)
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        return joined(self.builder, [call(self.builder, name, part[0].type, list(part)) for part in parts])

    def _narrow_sum(self, operands: list[tuple[Any, int]], x: Any, offset: Any, row: int) -> Any:
        """The offsets of a row are four int16: for each half of the operands, two pairs of columns."""
        parts = []
        for part in range(2):
            start = self.builder.bitcast(
                broadcast4(self.builder, offset, 8 * row + 4 * part, self.lanes), ir.VectorType(I16, 16)
            )
            parts.append(self._sum16(operands[4 * part : 4 * part + 4], x, 32 * row, start))
        return self.builder.add(*parts)

    def _sum16(self, operands: list[tuple[Any, int]], x: Any, first: int, start: Any) -> Any:
        """start, int16, plus the products that may be added to it in 16 bits; int32 by weight row."""
        for weight, column in operands:
            arguments = [weight, broadcast4(self.builder, x, first + column, self.lanes)]
            start = self.builder.add(start, call(self.builder, "llvm.x86.avx2.pmadd.ub.sw", start.type, arguments))
        return self._widened(start)

    def _widened(self, pairs: Any) -> Any:
        ones = constant(pairs.type, 1)
        return call(self.builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [pairs, ones])


@intrinsic
def add_group(
    typing: Any, kind: Any, totals: Any, tile: Any, scales: Any, table: Any, x: Any, scale: Any, offset: Any
) -> Any:
    """totals[t] (f32x16, or f32x8 for 8 rows of the tile) plus the group's share for every row t of activations.

    tile, scales: addresses of the first row's bytes and of its fp16 scale; table: address of 64 bytes of entries + 128
    (+ 32 if NARROW), then 64 bytes of entries, each 16 repeated; x, scale, offset: addresses of row 0's 32 codes, its
    fp32 scale, its int32 -z sum(q) (if NARROW, four int16, see quantize.py), with the other rows' right after.
    """
    n_weight_rows = 16 if totals.dtype == f32x16 else 8

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, totals_, tile_, scales_, table_, x_, scale_, offset_ = arguments
        emitter = _Emitter(context, builder, kind.count, n_weight_rows)
        operands = emitter.operands(tile_, table_)
        weights = half_to_float(context, builder, load(builder, scales_, ir.VectorType(I16, n_weight_rows)))
        results = []
        for row, total in enumerate(cgutils.unpack_tuple(builder, totals_, totals.count)):
            sums = emitter.group_sum(operands, x_, offset_, row)
            factor = builder.fmul(weights, splat(builder, total.type, load(builder, scale_, F32, 4 * row)))
            fma = f"llvm.fma.v{n_weight_rows}f32"
            results.append(call(builder, fma, total.type, [builder.sitofp(sums, total.type), factor, total]))
        return context.make_tuple(builder, signature.return_type, results)

    address = types.intp
    return totals(kind, totals, *([address] * 6)), codegen
