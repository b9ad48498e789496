"""The tensor types of GGUF files, with their weights and bytes per block. Source: ggml-common.h."""

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

    @property
    def has_minimum(self) -> bool:
        """Whether the type has 4-bit codes with a minimum per block in addition to the scale."""
        return self.name in ("Q4_1", "Q4_K")

    @property
    def is_linear(self) -> bool:
        """Whether the type's values are 4-bit integers times a scale, with or without a minimum."""
        return self.has_minimum or self.name == "Q4_0"


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
