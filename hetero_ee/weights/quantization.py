"""Which quantizer makes which tensors of a store."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_saved_format
from hetero_ee.hub.gguf.folder import gguf_files
from hetero_ee.layers.tensors import TensorRole
from hetero_ee.models.saved_format import BITSANDBYTES, FOUR_BIT_TYPES
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, QUANTIZER_CHANGES, TABLE_QUANTIZERS

GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantizers of the matrices and of the embedding and head. Measured in docs/quality.md."""

    matrices: str = DEFAULT_QUANTIZER
    vocabulary: str = "int8"
    # The format of a checkpoint that has its matrices in few bits, where those are kept as far as tiles can hold them:
    # "nf4" or "fp4" (bitsandbytes), "gptq", "awq", "compressed-tensors", "fp8" or "gguf". Matrices that it has as
    # floats, or that tiles can't hold, are quantized all the same; in 8 bits where the model says that 4 are too few.
    own: str | None = None
    neuron_major: bool = False  # FFNs neuron by neuron, so that inactive ones need not be read
    first_in_rows: bool = False  # the gate too: a predictor may spare its rows

    @classmethod
    def of_model(
        cls, folder: Path, quantizer: str | None, *, neuron_major: bool = False, first_in_rows: bool = False
    ) -> Self:
        """For the checkpoint in `folder`; None keeps its own bits and is else the default.

        Raises ModelError, and UsageError for a quantizer whose codes can't be neuron-major.
        """
        if neuron_major and quantizer in TABLE_QUANTIZERS:
            raise UsageError(
                f"sparse FFNs can't be in {quantizer}; leave out ",
                MODEL_OPTIONS["sparsity"],
                ", or choose another ",
                MODEL_OPTIONS["quantizer"],
                ".",
            )
        own = None if neuron_major else GGUF if gguf_files(folder) else _saved_name(folder)
        made = cls(own=own, neuron_major=neuron_major, first_in_rows=first_in_rows)
        if quantizer is None:
            return made
        return replace(made, matrices=quantizer, own=own if own == quantizer else None)

    @property
    def name(self) -> str:
        """What made the matrices, as a store's manifest has it."""
        return self.own or self.matrices

    @property
    def version(self) -> int:
        """Another number whenever one of the quantizers makes other bytes of the same weights."""
        return 1 + sum(QUANTIZER_CHANGES.get(name, 0) for name in (self.matrices, self.vocabulary))

    @property
    def identity(self) -> dict[str, Any]:
        """What a store made so is told apart by; of other layouts, as before there were neuron-major ones."""
        laid_out = ("neuron_major", "first_in_rows")
        return {name: value for name, value in asdict(self).items() if name not in laid_out or value}

    def quantizer_of(self, role: TensorRole) -> str:
        if role is TensorRole.MATRIX_8:
            return "int8"
        return self.vocabulary if role is TensorRole.VOCABULARY else self.matrices

    def keeps_codes(self, role: TensorRole) -> bool:
        """Whether tensors of this role stay in the checkpoint's own codes, where tiles can hold them."""
        return self.own is not None and (role is not TensorRole.VOCABULARY or self.own not in FOUR_BIT_TYPES)


def _saved_name(folder: Path) -> str | None:
    saved = read_saved_format(folder)
    if saved is None:
        return None
    return saved.values if saved.method == BITSANDBYTES else saved.method
