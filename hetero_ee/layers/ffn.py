"""The dense FFN: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hetero_ee.layers.ops import ACTIVE, DELTA, INNER, Activation, Array, Mixer, MixerSpec, Ops, Parameters, Rows
from hetero_ee.layers.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnSpec(MixerSpec):
    """Parameters of one layer's FFN."""

    name: ClassVar[str] = "ffn"

    size: int
    activation: Activation
    bias: bool

    @property
    def buffers(self) -> dict[str, int]:
        return {INNER: self.size * (2 if self.activation.gated else 1), ACTIVE: self.size}

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare gate_up, whose rows are those of gate and up, or only up without a gate; and down."""
        first, n_rows = ("gate_up", 2 * self.size) if self.activation.gated else ("up", self.size)
        tensors.matrix(first, n_rows, hidden_size, bias=self.bias)
        tensors.matrix("down", hidden_size, self.size, bias=self.bias)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> Mixer:
        first = parameters.matrix("gate_up" if self.activation.gated else "up")
        return Ffn(first, parameters.matrix("down"), self.activation)


class Ffn(Mixer):
    """One layer's dense FFN with its parameters on a device."""

    def __init__(self, first: Any, down: Any, activation: Activation) -> None:
        self._first, self._down, self._activation = first, down, activation

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        inner = ops.linear(x, self._first, INNER)
        return ops.linear(ops.activate(inner, self._activation), self._down, DELTA)
