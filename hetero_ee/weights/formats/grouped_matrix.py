"""The common part of saved matrices of integers in groups."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.models.saved_format import SavedFormat
from hetero_ee.weights.blocks import Blocks
from hetero_ee.weights.formats.grouped_codes import GroupedCodes, groups_in_order, n_groups
from hetero_ee.weights.formats.saved_matrix import RawTensors


@dataclass(frozen=True, slots=True)
class GroupedMatrix(ABC):
    """A SavedMatrix except for its tensors; `module` is the common prefix of their names."""

    module: str
    shape: tuple[int, int]
    saved: SavedFormat
    tensors: RawTensors
    in_order: bool = False  # whether columns are read sorted by their groups

    @property
    def bits(self) -> int:
        return 8 if self.saved.values == "int8" else 4

    @property
    def n_groups(self) -> int:
        return n_groups(self.shape[1], self.saved.group_size)

    def dequantize(self) -> Tensor:
        return self._read().dequantize()

    def blocks(self, *, in_8_bits: bool) -> Blocks | None:
        return self._read().blocks(in_8_bits=in_8_bits)

    def column_order(self) -> Tensor | None:
        """Return the order in which columns are read; None if it is the file's."""
        return torch.argsort(self.groups(), stable=True) if self.in_order else None

    def groups(self) -> Tensor:
        """Return the group of each column, int64 (K,). Raises CheckpointError."""
        return groups_in_order(self.shape[1], self.saved.group_size)

    @abstractmethod
    def codes(self) -> GroupedCodes:
        """Return the codes with columns in the file's order. Raises CheckpointError."""

    def _read(self) -> GroupedCodes:
        return self.codes().columns(self.column_order())
