"""The dense FFN: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

from hetero_ee.layers.ops import DELTA, INNER, Array, Mixer, Ops, Parameters, Rows
from hetero_ee.models.spec import FfnSpec


class Ffn(Mixer):
    """The dense FFN of one layer on a device. It has no state."""

    def __init__(self, spec: FfnSpec, parameters: Parameters) -> None:
        self._first = parameters.matrix("gate_up" if spec.activation.gated else "up")
        self._down, self._activation = parameters.matrix("down"), spec.activation

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        """Return what to add to the hidden states whose norm is x (m, hidden)."""
        inner = ops.linear(x, self._first, INNER)
        return ops.linear(ops.activate(inner, self._activation), self._down, DELTA)
