"""What became of the types of a GGUF file's tensors in a conversion, and what that cost."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.models.blocks import TensorSpec
from hetero_ee.weights.weight import TileWeight

CHUNK_WEIGHTS = 2**22  # compared together


@dataclass(slots=True)
class ImportedType:
    """The tensors of one type, or of several that are stacked, that became tiles of one layout."""

    types: str  # "Q4_K", or "Q4_K, Q6_K" of parts that are one matrix here
    layout: str
    is_exact: bool
    n_tensors: int = 0
    n_weights: int = 0
    squared_error: float = 0.0
    squares: float = 0.0  # of the weights, which the error is relative to


class ImportReport:
    """Counts the tensors that this run converts; of a conversion that was resumed not the ones before."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, bool], ImportedType] = {}

    def add(self, types: list[str], tensor: TensorSpec, weight: TileWeight, values: Tensor | None) -> None:
        """values: what was quantized to `weight`, fp32; None where it was taken as it is."""
        layout = "int8" if weight.codebook is None else "int4"
        key = ", ".join(types), layout, values is None
        row = self._found.setdefault(key, ImportedType(*key))
        row.n_tensors += 1
        row.n_weights += tensor.n_elements
        if values is not None:
            error, squares = _errors(weight, values)
            row.squared_error += error
            row.squares += squares

    def rows(self) -> list[dict[str, Any]]:
        """For a manifest: each kind with its error relative to its weights' squares."""
        found = []
        for row in sorted(self._found.values(), key=lambda row: -row.n_weights):
            values = asdict(row)
            error, squares = values.pop("squared_error"), values.pop("squares")
            found.append(values | {"relative_squared_error": error / squares if squares else 0.0})
        return found


def _errors(weight: TileWeight, values: Tensor) -> tuple[float, float]:
    n_rows, error, squares = max(1, CHUNK_WEIGHTS // values.shape[1]), 0.0, 0.0
    for first in range(0, len(values), n_rows):
        chunk = values[first : first + n_rows].double()
        found = weight.rows(torch.arange(first, first + len(chunk))).double()
        error += float((found - chunk).square().sum())
        squares += float(chunk.square().sum())
    return error, squares
