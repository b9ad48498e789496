"""Exit map: a linear map from a hidden state in the middle of the model to an estimate of its final value.

    y = x + x W + b

x is the normed hidden state after some layer, and y estimates the normed state after the last layer. W is (hidden,
hidden), or low-rank in two factors. Since W and b are a correction, a map without training data is the identity.
calibration/map_fitting.py fits the map.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hetero_ee.runtime.drafted import StateMap
from hetero_ee.weights.quantizers import quantize
from hetero_ee.weights.weight import DenseWeight

MAP_QUANTIZER = "int8"


@dataclass(frozen=True, slots=True, eq=False)
class ExitMap:
    """Linear map x + x W + b with W^T = up @ down."""

    down: Tensor | None  # fp32 (rank, hidden); None for full rank, W^T = up then
    up: Tensor  # fp32 (hidden, rank)
    bias: Tensor  # fp32 (hidden,)

    def __post_init__(self) -> None:
        n_inner = self.up.shape[0] if self.down is None else self.down.shape[0]
        n_outer = self.up.shape[0] if self.down is None else self.down.shape[1]
        if self.up.shape != (n_outer, n_inner) or self.bias.shape != (n_outer,):
            raise ValueError(f"factors {tuple(self.up.shape)} and bias {tuple(self.bias.shape)} are of no map")

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    @property
    def parts(self) -> dict[str, Tensor]:
        down = {} if self.down is None else {"down": self.down}
        return {**down, "up": self.up, "bias": self.bias}

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor]) -> Self:
        """Build a map from the tensors that `parts` returns."""
        return cls(parts.get("down"), parts["up"], parts["bias"])

    @torch.inference_mode()
    def apply(self, normed: Tensor) -> Tensor:
        """Map (m, hidden) to (m, hidden). The last bits of a row may depend on the others."""
        inner = normed if self.down is None else normed @ self.down.T
        return normed + (inner @ self.up.T + self.bias)

    def packed(self, *, compiled: bool) -> StateMap:
        """Return the map in the format of executors: int8 tiles for compiled kernels, fp32 for the reference."""
        up, down = (
            None if part is None else quantize(part, MAP_QUANTIZER) if compiled else DenseWeight(part)
            for part in (self.up, self.down)
        )
        assert up is not None
        return StateMap(up, down, self.bias)

    def rounded(self) -> Self:
        """Return the map rounded to fp16, as on disk. Raises: ValueError: if a value is too large for fp16."""
        halves = {name: part.half().float() for name, part in self.parts.items()}
        if not all(bool(torch.isfinite(part).all()) for part in halves.values()):
            raise ValueError("the map has values that fp16 can't hold")
        return self.of_parts(halves)
