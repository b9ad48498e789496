"""Decide which quantizer is used for each tensor of a store."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_saved_format
from hetero_ee.hub.gguf.folder import gguf_files
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.saved_format import BITSANDBYTES, FOUR_BIT_TYPES
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, QUANTIZER_CHANGES, QUANTIZERS, ROW_QUANTIZERS

GGUF = "gguf"
CALIBRATED = "-calibrated"  # suffix of the quantizer's name


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantizers of the matrices and of the vocabulary (embedding and head), measured in docs/quality.md."""

    matrices: str = DEFAULT_QUANTIZER
    vocabulary: str = "int8"
    # Format of a quantized checkpoint whose codes are kept if tiles can hold them: "nf4" or "fp4" (bitsandbytes),
    # "gptq", "awq", "compressed-tensors", "fp8" or "gguf". Its other matrices, floats or not representable in tiles,
    # are quantized; in 8 bits if the model says that 4 are too few. With `layouts`, those are quantized too.
    own: str | None = None
    neuron_major: bool = False  # stores FFNs neuron by neuron, so that inactive ones need not be read
    first_in_rows: bool = False  # stores the gate by neurons, too, for a predictor that skips its rows
    calibration: str = ""  # hash of the text whose inputs matrices are rounded for; empty without a text
    bits: float | None = None  # average of the layers' matrices, if bits are dealt out over them
    # If bits are dealt out: names and layouts of the matrices that are neither in int4 nor in the file's own codes.
    layouts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_model(
        cls, folder: Path, quantizer: str | None, *, neuron_major: bool = False, first_in_rows: bool = False
    ) -> Self:
        """Choose quantizers for the checkpoint in `folder`. A `quantizer` of None keeps the checkpoint's own codes.

        Raises:
            ModelError: if config.json cannot be used.
            UsageError: if the quantizer's codes cannot be neuron-major.
        """
        if neuron_major and quantizer not in (None, *ROW_QUANTIZERS):
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
        """Name that a store's manifest gives to the quantizer of the matrices."""
        dealt = "" if self.bits is None else f"-{self.bits:.2f}"
        return (self.own or self.matrices) + dealt + (CALIBRATED if self.calibration else "")

    @property
    def version(self) -> int:
        """A number that changes whenever one of the quantizers makes other bytes from the same weights."""
        return 1 + sum(QUANTIZER_CHANGES.get(name, 0) for name in (self.matrices, self.vocabulary, self.own))

    @property
    def identity(self) -> dict[str, Any]:
        """Values that identify a store. Newer ones are included only if set, because older stores lack them."""
        newer = ("neuron_major", "first_in_rows", "calibration", "bits", "layouts")
        return {name: value for name, value in asdict(self).items() if name not in newer or value}

    def quantizer_of(self, role: TensorRole) -> str:
        if role.value in QUANTIZERS:
            return role.value
        return self.vocabulary if role is TensorRole.VOCABULARY else self.matrices

    def keeps_codes(self, tensor: TensorSpec) -> bool:
        """Return whether a tensor keeps the checkpoint's codes if tiles can hold them."""
        if self.own is None or tensor.name in dict(self.layouts):
            return False
        return tensor.role is not TensorRole.VOCABULARY or self.own not in FOUR_BIT_TYPES


def _saved_name(folder: Path) -> str | None:
    saved = read_saved_format(folder)
    if saved is None:
        return None
    return saved.values if saved.method == BITSANDBYTES else saved.method
