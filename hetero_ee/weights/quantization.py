"""Which quantizer makes which tensors of a store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hetero_ee.hub.config_file import read_four_bit_type
from hetero_ee.models.blocks import TensorRole
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, QUANTIZER_CHANGES


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantizers of the matrices and of the embedding and head. Measured in docs/quality.md."""

    matrices: str = DEFAULT_QUANTIZER
    vocabulary: str = "int8"
    # "nf4" or "fp4" where the checkpoint has its matrices in these 4 bits and they are kept; the matrices that it has
    # as floats, or whose codes tiles can't hold, are quantized all the same.
    own: str | None = None

    @classmethod
    def of_model(cls, folder: Path, quantizer: str | None) -> Self:
        """For the checkpoint in `folder`; None keeps its own 4 bits and is else the default. Raises ModelError."""
        own = read_four_bit_type(folder)
        if quantizer is None:
            return cls(own=own)
        return cls(matrices=quantizer, own=own if own == quantizer else None)

    @property
    def name(self) -> str:
        """What made the matrices, as a store's manifest has it."""
        return self.own or self.matrices

    @property
    def version(self) -> int:
        """Another number whenever one of the quantizers makes other bytes of the same weights."""
        return 1 + sum(QUANTIZER_CHANGES.get(name, 0) for name in (self.matrices, self.vocabulary))

    def quantizer_of(self, role: TensorRole) -> str:
        return self.vocabulary if role is TensorRole.VOCABULARY else self.matrices

    def keeps_codes(self, role: TensorRole) -> bool:
        """Whether tensors of this role stay in the checkpoint's own 4-bit codes."""
        return self.own is not None and role is TensorRole.MATRIX
