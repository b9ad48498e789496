"""What became of the types of tensors of a GGUF file, or another format, in a conversion, and what that cost."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.models.blocks import TensorSpec
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.records import from_json

CHUNK_WEIGHTS = 2**22  # compared together
TYPES_FIELD = "types"  # of a manifest's source


@dataclass(frozen=True, slots=True)
class ImportedType:
    """The matrices of one type, or of several whose parts are one matrix here, that became tiles of one layout."""

    types: str  # "Q4_K", or "Q4_K, Q6_K"
    layout: str
    is_exact: bool
    n_tensors: int
    n_weights: int
    relative_squared_error: float  # sum of squared errors over that of the weights' squares


class ImportReport:
    """Counts the tensors that this run converts; of a conversion that was resumed not the ones before."""

    def __init__(self, title: str | None) -> None:
        self._title = title  # of the checkpoint's format
        # tensors, weights, squared error, squares
        self._sums: dict[tuple[str, str, bool], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])

    def add(self, types: list[str], tensor: TensorSpec, weight: TileWeight, values: Tensor | None) -> None:
        """values: what became `weight`, fp32; None where it is known to be the same."""
        added = 1, tensor.n_elements, *((0.0, 0.0) if values is None else _errors(weight, values))
        sums = self._sums[", ".join(types), weight.layout, added[2] == 0]
        sums[:] = [before + more for before, more in zip(sums, added, strict=True)]

    def fields(self) -> dict[str, Any]:
        """For a manifest's source: nothing where there is nothing to report."""
        rows = [
            ImportedType(*key, int(n_tensors), int(n_weights), error / squares if squares else 0.0)
            for key, (n_tensors, n_weights, error, squares) in self._sums.items()
        ]
        rows.sort(key=lambda row: -row.n_weights)
        return {"format": self._title, TYPES_FIELD: list(map(asdict, rows))} if rows else {}


def imported_types(source: Mapping[str, Any]) -> list[ImportedType]:
    """What a manifest's source says of it; nothing where that can't be read."""
    rows = source.get(TYPES_FIELD)
    try:
        return [from_json(ImportedType, json.dumps(row)) for row in rows] if isinstance(rows, list) else []
    except ValueError:
        return []


def exact_share(rows: list[ImportedType]) -> float | None:
    """Of all weights those that were taken exactly; None where there are none."""
    n_weights = sum(row.n_weights for row in rows)
    return sum(row.n_weights for row in rows if row.is_exact) / n_weights if n_weights else None


def _errors(weight: TileWeight, values: Tensor) -> tuple[float, float]:
    n_rows, error, squares = max(1, CHUNK_WEIGHTS // values.shape[1]), 0.0, 0.0
    for first in range(0, len(values), n_rows):
        chunk = values[first : first + n_rows].double()
        found = weight.rows(torch.arange(first, first + len(chunk))).double()
        error += float((found - chunk).square().sum())
        squares += float(chunk.square().sum())
    return error, squares
