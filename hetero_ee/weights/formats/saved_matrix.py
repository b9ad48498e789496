"""The interface of quantized matrices in a checkpoint, and access to its tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, shown
from hetero_ee.models.saved_format import SavedFormat
from hetero_ee.weights.blocks import RowBlocks

FLOATS = ("F32", "F16", "BF16")  # safetensors' types that scales may have
Layout = Mapping[str, tuple[Any, ...]]  # suffix of a tensor -> its possible types, then its possible shapes


@dataclass(frozen=True, slots=True)
class RawTensors:
    """A checkpoint's tensors as its files store them. `header` returns a tensor's safetensors type and its shape."""

    folder: Path
    names: Set[str]
    header: Callable[[str], tuple[str, tuple[int, ...]]]
    read: Callable[[str], Tensor]

    def failure(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: tensor {name} {problem}; get the checkpoint again.")

    def require(self, name: str, kinds: Collection[str], *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Check a tensor's type and shape and return the shape. Raises CheckpointError."""
        if name not in self.names:
            raise self.failure(name, "is missing")
        kind, shape = self.header(name)
        if kind not in kinds or shape not in shapes:
            expected = f"{' or '.join(kinds)} and {' or '.join(shown(list(each)) for each in shapes)}"
            raise self.failure(name, f"has type {kind} and shape {shown(list(shape))}, expected {expected}")
        return shape

    def finite(self, name: str) -> Tensor:
        """Return the tensor as fp32. Raises CheckpointError for NaN or Inf."""
        values = self.read(name).float()
        if not torch.isfinite(torch.stack(torch.aminmax(values))).all():
            index = [int(i) for i in (~torch.isfinite(values)).nonzero()[0]]
            raise self.failure(name, f"gives {values[tuple(index)].item()} at {index}")
        return values


@dataclass(frozen=True, slots=True)
class StoredMatrix(ABC):
    """Base of quantized matrices whose tensors' names begin with `module`. Checks the tensors' types and shapes."""

    module: str
    shape: tuple[int, int]
    saved: SavedFormat
    tensors: RawTensors
    in_order: bool = False  # whether columns are read sorted by their groups

    def __post_init__(self) -> None:
        for suffix, (kinds, *shapes) in self.layout().items():
            self.tensors.require(self.module + suffix, kinds, *shapes)

    @abstractmethod
    def layout(self) -> Layout:
        """Return the types and shapes that config.json implies. Raises: CheckpointError: for impossible sizes."""

    @property
    def tensor_names(self) -> Set[str]:
        return {self.module + suffix for suffix in self.layout()}

    def has(self, suffix: str) -> bool:
        return self.module + suffix in self.tensors.names

    def read(self, suffix: str) -> Tensor:
        return self.tensors.read(self.module + suffix)

    def finite(self, suffix: str) -> Tensor:
        return self.tensors.finite(self.module + suffix)

    def failure(self, suffix: str, problem: str) -> CheckpointError:
        return self.tensors.failure(self.module + suffix, problem)


class SavedMatrix(Protocol):
    """A quantized matrix with checked headers. Its values are checked when read, which may raise CheckpointError."""

    @property
    def tensor_names(self) -> Set[str]:
        """Names of the tensors that may belong to the matrix."""
        ...

    def dequantize(self) -> Tensor:
        """Return the weights as fp32 (N, K), as the checkpoint's format defines them."""
        ...

    def blocks(self, *, in_8_bits: bool) -> RowBlocks | None:
        """Return the weights in blocks of 32 columns, rounded if necessary; None if groups don't fit such blocks."""
        ...
