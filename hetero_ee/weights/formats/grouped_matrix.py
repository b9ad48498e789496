"""Define the base of quantized matrices whose columns are grouped, with a scale per group."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.weights.blocks import RowBlocks
from hetero_ee.weights.formats.grouped_codes import GroupedCodes
from hetero_ee.weights.formats.saved_matrix import StoredMatrix


@dataclass(frozen=True, slots=True)
class GroupedMatrix(StoredMatrix):
    """Base of the formats with a scale per group of columns. A subclass reads the tensors of its format."""

    @property
    def bits(self) -> int:
        return 8 if self.saved.values == "int8" else 4

    @property
    def n_groups(self) -> int:
        return -(-self.shape[1] // (self.saved.group_size or self.shape[1]))

    def dequantize(self) -> Tensor:
        return self._read().dequantize()

    def blocks(self, *, in_8_bits: bool) -> RowBlocks | None:
        return self._read().blocks(in_8_bits=in_8_bits)

    def column_order(self) -> Tensor | None:
        """Return the order in which columns are read, sorted by group; None if it is the file's order."""
        return torch.argsort(self.groups(), stable=True) if self.in_order else None

    def groups(self) -> Tensor:
        """Return the group of each column, int64 (K,). Raises CheckpointError."""
        return torch.arange(self.shape[1]) // (self.saved.group_size or self.shape[1])

    def checked_groups(self, suffix: str) -> Tensor:
        """Read each column's group from a tensor, int64 (K,). Raises CheckpointError for a group that doesn't exist."""
        groups = self.read(suffix).long()
        outside = (groups < 0) | (groups >= self.n_groups)
        if outside.any():
            index = int(outside.nonzero()[0])
            raise self.failure(
                suffix, f"has group {int(groups[index])} at [{index}], expected 0 to {self.n_groups - 1}"
            )
        return groups

    @abstractmethod
    def codes(self) -> GroupedCodes:
        """Read the codes, with columns in the file's order. Raises CheckpointError."""

    def _read(self) -> GroupedCodes:
        return self.codes().columns(self.column_order())
