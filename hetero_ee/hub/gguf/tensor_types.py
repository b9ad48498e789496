"""The tensor types of GGUF files, with their weights and bytes per block. Source: ggml-common.h."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NARROW_BITS = 5.0  # Q4_1, the widest of the 4-bit types; Q5_0 and Q5_K have 5.5


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type, named as in ggml."""

    name: str
    block_weights: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits per weight, including scales."""
        return 8 * self.block_bytes / self.block_weights

    @property
    def is_float(self) -> bool:
        return self.block_weights == 1

    @property
    def is_wide(self) -> bool:
        """Whether the type is quantized with clearly more bits than 4-bit tiles have."""
        return not self.is_float and self.bits > MAX_NARROW_BITS


# Layouts that keep a type's codes, and the types' layouts that each of them can hold, the narrowest first.
_LAYOUTS = {"Q4_0": "int4", "Q5_0": "int5", "Q6_K": "int6", "Q8_0": "int8"}
_LAYOUTS |= dict.fromkeys(("Q4_1", "Q4_K"), "int4 zeros") | dict.fromkeys(("Q5_1", "Q5_K"), "int5 zeros")
_HELD = {
    "int4": {"int4"},
    "int4 zeros": {"int4", "int4 zeros"},
    "int5": {"int4", "int5"},
    "int5 zeros": {"int4", "int4 zeros", "int5", "int5 zeros"},
    "int6": {"int4", "int5", "int6"},
}


def stacked_layout(types: Sequence[TensorType]) -> str:
    """Return the narrowest layout that keeps the codes of tensors of these types, which are stacked in one matrix.

    Without such a layout, it is int8 if one of the types clearly has more than 4 bits, and int4 otherwise.
    """
    layouts = {_LAYOUTS.get(each.name, "") for each in types}
    held = next((name for name, found in _HELD.items() if layouts <= found), None)
    return held or ("int8" if any(each.is_wide for each in types) else "int4")


_SUPER = 256  # weights per block of the K and IQ types
_KNOWN: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", _SUPER, 84),
    11: ("Q3_K", _SUPER, 110),
    12: ("Q4_K", _SUPER, 144),
    13: ("Q5_K", _SUPER, 176),
    14: ("Q6_K", _SUPER, 210),
    16: ("IQ2_XXS", _SUPER, 66),
    17: ("IQ2_XS", _SUPER, 74),
    18: ("IQ3_XXS", _SUPER, 98),
    19: ("IQ1_S", _SUPER, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", _SUPER, 110),
    22: ("IQ2_S", _SUPER, 82),
    23: ("IQ4_XS", _SUPER, 136),
    29: ("IQ1_M", _SUPER, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", _SUPER, 54),
    35: ("TQ2_0", _SUPER, 66),
    39: ("MXFP4", 32, 17),
}
TENSOR_TYPES = {number: TensorType(*known) for number, known in _KNOWN.items()}
