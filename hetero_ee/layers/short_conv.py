"""Gated short convolution (LFM2, arXiv 2511.23404): each channel mixes its last few inputs, between two gates.

The input's matrix computes three parts b, c and x of each token; the output is c * conv(b * x).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hetero_ee.layers.ops import ATTENDED, DELTA, QKV, Array, Mixer, MixerSpec, Ops, Parameters, Rows
from hetero_ee.layers.state import RecurrentState
from hetero_ee.layers.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(MixerSpec):
    """Parameters of one layer's gated short convolution."""

    name: ClassVar[str] = "short_conv"

    n_channels: int
    kernel: int  # tokens that the convolution sees

    @property
    def state(self) -> RecurrentState:
        return RecurrentState(0, 0, 0, 0, self.n_channels, self.kernel)

    @property
    def buffers(self) -> dict[str, int]:
        return {QKV: 3 * self.n_channels, ATTENDED: self.n_channels}

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare input, whose rows are those of b, c and x, the convolution's weights, and the output's matrix."""
        tensors.matrix("input", 3 * self.n_channels, hidden_size)
        tensors.vector("conv", self.n_channels, self.kernel)
        tensors.matrix("output", hidden_size, self.n_channels)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> "ShortConv":
        conv = ops.conv(layer, cache, parameters.vector("conv"))
        return ShortConv(parameters.matrix("input"), parameters.matrix("output"), conv)


class ShortConv(Mixer):
    """One layer's gated short convolution with its parameters on a device."""

    has_state = True

    def __init__(self, inputs: Any, output: Any, conv: Any) -> None:
        self._inputs, self._output, self._conv = inputs, output, conv

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        mixed = ops.short_conv(ops.linear(x, self._inputs, QKV), self._conv, rows)
        return ops.linear(mixed, self._output, DELTA)
