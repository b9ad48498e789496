"""Report what each tensor type of a quantized checkpoint became in a conversion, and the error that this caused."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.weights.blocks import RowBlocks
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.records import from_values

SAMPLED_ROWS = 64  # evenly spread
TYPES_FIELD = "types"  # of a manifest's source


@dataclass(frozen=True, slots=True)
class ImportedType:
    """Matrices of one type, or of several types stacked to one matrix, that were converted to the same tile layout."""

    types: str  # "Q4_K", or "Q4_K, Q6_K"
    layout: str
    is_exact: bool
    n_tensors: int
    n_weights: int
    relative_squared_error: float  # sum of squared errors over the sum of squares, in SAMPLED_ROWS of each part


class ImportReport:
    """Counts the matrices that one run converts. A resumed conversion leaves out those of earlier runs.

    `title` names the checkpoint's format.
    """

    def __init__(self, title: str | None) -> None:
        self._title = title
        # n_tensors, n_weights, squared error, squares
        self._sums: dict[tuple[str, str, bool], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])

    def add(
        self, types: list[str], tensor: TensorSpec, weight: TileWeight, wanted: Sequence[RowBlocks | Tensor] | None
    ) -> None:
        """Count a matrix. `wanted` holds the values it was made from, by part; None if it equals them exactly."""
        added = 1, tensor.n_elements, *((0.0, 0.0) if wanted is None else _errors(weight, wanted))
        sums = self._sums[", ".join(types), weight.layout, added[2] == 0]
        sums[:] = [before + more for before, more in zip(sums, added, strict=True)]

    def fields(self) -> dict[str, Any]:
        """Return the fields to add to the manifest's source; empty if there is nothing to report."""
        rows = [
            ImportedType(*key, int(n_tensors), int(n_weights), error / squares if squares else 0.0)
            for key, (n_tensors, n_weights, error, squares) in self._sums.items()
        ]
        rows.sort(key=lambda row: -row.n_weights)
        return {"format": self._title, TYPES_FIELD: list(map(asdict, rows))} if rows else {}


def imported_types(source: Mapping[str, Any]) -> list[ImportedType]:
    """Read the imported types in a manifest's source. The list is empty if they can't be read."""
    rows = source.get(TYPES_FIELD)
    try:
        return [from_values(ImportedType, row) for row in rows] if isinstance(rows, list) else []
    except ValueError:
        return []


def exact_share(rows: list[ImportedType]) -> float | None:
    """Return the share of the weights that keep the checkpoint's values exactly, None if there are no weights."""
    n_weights = sum(row.n_weights for row in rows)
    return sum(row.n_weights for row in rows if row.is_exact) / n_weights if n_weights else None


def mean_error(rows: list[ImportedType]) -> float | None:
    """Return the mean relative squared error of the weights, None if there are no weights."""
    n_weights = sum(row.n_weights for row in rows)
    return sum(row.n_weights * row.relative_squared_error for row in rows) / n_weights if n_weights else None


def _errors(weight: TileWeight, wanted: Sequence[RowBlocks | Tensor]) -> tuple[float, float]:
    """Return the sum of squared errors, and the sum of squares, over some rows of each part.

    Comparing all rows would need longer than the rest of the conversion: 28 of 33 s if the file's codes are kept.
    """
    first, error, squares = 0, 0.0, 0.0
    for part in wanted:
        n_rows = part.n_rows if isinstance(part, RowBlocks) else len(part)
        rows = torch.linspace(0, n_rows - 1, min(n_rows, SAMPLED_ROWS)).long()
        values = (part.file_values(rows) if isinstance(part, RowBlocks) else part[rows]).double()
        error += float((weight.rows(first + rows).double() - values).square().sum())
        squares += float(values.square().sum())
        first += n_rows
    return error, squares
