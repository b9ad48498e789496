"""What a checkpoint's reader sees of a matrix that was saved otherwise than as floats, and of its tensors."""

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, shown
from hetero_ee.weights.blocks import Blocks

FLOATS = ("F32", "F16", "BF16")  # safetensors' names of what scales are saved in


@dataclass(frozen=True, slots=True)
class RawTensors:
    """A checkpoint's tensors as they lie in its files. header: name -> safetensors type and shape."""

    folder: Path
    names: Set[str]
    header: Callable[[str], tuple[str, tuple[int, ...]]]
    read: Callable[[str], Tensor]

    def failure(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: tensor {name} {problem}; get the checkpoint again.")

    def require(self, name: str, kinds: Collection[str], *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor that is of one of these types and shapes. Raises CheckpointError."""
        if name not in self.names:
            raise self.failure(name, "is missing")
        kind, shape = self.header(name)
        if kind not in kinds or shape not in shapes:
            expected = f"{' or '.join(kinds)} and {' or '.join(shown(list(each)) for each in shapes)}"
            raise self.failure(name, f"has type {kind} and shape {shown(list(shape))}, expected {expected}")
        return shape

    def finite(self, name: str) -> Tensor:
        """The tensor as fp32. Raises CheckpointError at a NaN or Inf."""
        values = self.read(name).float()
        finite = torch.isfinite(values)
        if not finite.all():
            index = [int(i) for i in (~finite).nonzero()[0]]
            raise self.failure(name, f"gives {values[tuple(index)].item()} at {index}")
        return values


class SavedMatrix(Protocol):
    """One matrix, its headers checked; values are checked when read. Reading raises CheckpointError."""

    @property
    def tensor_names(self) -> Set[str]:
        """The tensors it may lie in."""
        ...

    def dequantize(self) -> Tensor:
        """fp32 (N, K): the values that the checkpoint means."""
        ...

    def blocks(self, *, in_8_bits: bool) -> Blocks | None:
        """The same, or the nearest that 8 bits hold, in blocks of 32; None where their groups are others."""
        ...
