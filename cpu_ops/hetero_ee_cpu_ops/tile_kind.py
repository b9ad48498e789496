"""The kinds of tile that matmuls multiply. Each is a Numba type, so that each gets a compiled kernel of its own.

LINEAR    int4, entry = code - 8.             CODEBOOK  int4, entry = table[code].
BYTES     int8, entry = the byte.             NARROW    CODEBOOK with no entry beyond -32 .. 32; only on AVX2.
ZEROS     LINEAR with a zero point for each row of the tile.
FIVE      5 bits, entry = code - 16.          FIVE_ZEROS the same with zero points.
SIX       6 bits, entry = code - 32, with a scale for each half of a row's 32 columns.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl

from hetero_ee_cpu_ops.simd.bytes import I64, target_has

LINEAR_CODEBOOK = tuple(range(-8, 8))
NARROW_LIMIT = 32  # largest magnitude of an entry for which four products fit in 16 bits


@dataclass(frozen=True, slots=True, order=True)
class TileKind:
    """A kind of tile: 16 rows x 32 columns, with its scales and the offsets that it needs of activations."""

    name: str
    tile_bytes: int = 256
    scales_bytes: int = 32  # of a tile, zero points included
    offset_bytes: int = 4  # of one group of activations, see quantize.py


LINEAR, CODEBOOK, BYTES = TileKind("linear"), TileKind("codebook"), TileKind("bytes", tile_bytes=512)
NARROW, ZEROS = TileKind("narrow", offset_bytes=8), TileKind("zeros", scales_bytes=64)
FIVE, FIVE_ZEROS = TileKind("five", tile_bytes=320), TileKind("five zeros", tile_bytes=320, scales_bytes=64)
SIX = TileKind("six", tile_bytes=384, scales_bytes=64, offset_bytes=8)
WITHOUT_CODEBOOK = (BYTES, FIVE, FIVE_ZEROS, SIX)


class TileKindType(types.Type):
    """The Numba type of one kind, whose values have no content."""

    def __init__(self, kind: TileKind) -> None:
        self.kind = kind
        super().__init__(name=f"TileKind({kind.name})")


register_model(TileKindType)(models.OpaqueModel)


@typeof_impl.register(TileKind)
def _type_of(kind: TileKind, _context: Any) -> TileKindType:
    return TileKindType(kind)


@lower_constant(TileKindType)
def _constant(context: Any, _builder: Any, _type: Any, _kind: Any) -> Any:
    return context.get_dummy_value()


def _size(field: str) -> Any:
    """Return an intrinsic that gives a kind's field as a compile-time constant."""

    def function(typing: Any, kind: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return ir.Constant(I64, getattr(kind.kind, field))

        return types.intp(kind), codegen

    function.__name__ = field
    return intrinsic(function)


tile_bytes, scales_bytes, offset_bytes = _size("tile_bytes"), _size("scales_bytes"), _size("offset_bytes")


def tile_kind(context: Any, codebook: tuple[int, ...] | None, n_bytes: int, n_scales: int) -> TileKind:
    """Return the kind of tile with these sizes on the JIT target.

    Args:
        codebook: 16 entries for 4-bit tiles, None for others.
        n_bytes: bytes of a tile.
        n_scales: scales and zero points of a tile.

    Raises:
        KeyError: if no kind has these sizes.
    """
    is_narrow = codebook is not None and max(map(abs, codebook)) <= NARROW_LIMIT
    kinds: tuple[TileKind, ...] = (NARROW if is_narrow and adds_in_16_bits(context) else CODEBOOK,)
    if codebook is None or codebook == LINEAR_CODEBOOK:
        kinds = WITHOUT_CODEBOOK if codebook is None else (LINEAR, ZEROS)
    return {(each.tile_bytes, each.scales_bytes): each for each in kinds}[n_bytes, 2 * n_scales]


def adds_in_16_bits(context: Any) -> bool:
    """Return whether the JIT target adds byte products in 16 bits, as AVX2 does without VNNI."""
    has_dot = target_has(context, "avx512vnni") or target_has(context, "avxvnni")
    return target_has(context, "avx2") and not has_dot


def byte_bias(context: Any) -> int:
    """Return the bias that makes entries of -32 .. 32 unsigned, if the target's byte products need that."""
    return NARROW_LIMIT if adds_in_16_bits(context) else 128


def has_wide_registers(context: Any) -> bool:
    """Return whether one register holds 16 rows. Otherwise it holds 8, and row blocks are computed in halves."""
    return target_has(context, "avx512vnni") or not target_has(context, "avx2")
