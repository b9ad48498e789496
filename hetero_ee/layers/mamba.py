"""Mamba-2 (arXiv 2405.21060): linear attention whose state is a matrix per head, which only decays and grows.

A causal convolution and SiLU mix each channel of C, B and x with its last inputs. Adjacent heads share B and C. With a
head's x, its matrix S and its time step,

    step = softplus(dt + dt_bias),  decay = exp(-exp(a_log) step),  S' = decay S + B (step x)^T,  y = S'^T C + skip x

This is a gated delta rule that replaces nothing, with queries C, keys B and values x. Outputs are multiplied by SiLU of
their gates, and normed in groups of the heads that share B and C.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from hetero_ee.layers.delta import GatedDeltaSpec
from hetero_ee.layers.ops import ATTENDED, DELTA, MIXED, QKV, Array, Mixer, Norm, Ops, Parameters, Rows
from hetero_ee.layers.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(GatedDeltaSpec):
    """Parameters of one layer's Mamba-2. Keys and queries are B and C, of which there is one per group of heads."""

    name: ClassVar[str] = "mamba"

    has_conv_bias: bool

    @property
    def input_size(self) -> int:
        return self.n_channels + self.value_size + self.n_value_heads

    @property
    def buffers(self) -> dict[str, int]:
        mixed = self.n_channels + 2 * self.n_value_heads
        return {QKV: self.input_size, ATTENDED: self.value_size, MIXED: mixed}

    def picked_rows(self, short: str) -> Sequence[tuple[int, Sequence[int]]]:
        """See MixerSpec. Checkpoints have gates, x, B, C and time steps in this order."""
        shared = self.n_key_heads * self.key_dim
        if short == "conv":
            return _parts((self.value_size, shared, shared), (2, 1, 0))
        sizes = self.value_size, self.value_size, shared, shared, self.n_value_heads
        return _parts(sizes, (3, 2, 1, 0, 4)) if short == "input" else ()

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare input, whose rows are those of C, B, x, gates and time steps, and the other parameters."""
        tensors.matrix("input", self.input_size, hidden_size)
        tensors.vector("conv", self.n_channels, self.kernel)
        if self.has_conv_bias:
            tensors.vector("conv_bias", self.n_channels)
        for short in ("a_log", "dt_bias", "skips"):
            tensors.vector(short, self.n_value_heads)
        tensors.vector("gated_norm", self.value_size)
        tensors.matrix("output", hidden_size, self.value_size)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> Mixer:
        vectors = tuple(map(parameters.vector, ("conv", "a_log", "dt_bias", "skips", "conv_bias")))
        norm = Norm("rms", parameters.vector("gated_norm"), None, self.norm_eps)
        rule = ops.mamba_rule(self, layer, cache, vectors, norm)
        return Mamba(parameters.matrix("input"), parameters.matrix("output"), rule)


def _parts(sizes: Sequence[int], order: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
    """Return the rows of consecutive parts of these sizes, in another order."""
    ends = [*accumulate(sizes)]
    return [(ends[-1], range(ends[part] - sizes[part], ends[part])) for part in order]


class Mamba(Mixer):
    """One layer's Mamba-2 with its parameters on a device."""

    has_state = True

    def __init__(self, inputs: Any, output: Any, rule: Any) -> None:
        self._inputs, self._output, self._rule = inputs, output, rule

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        mixed = ops.mamba(ops.linear(x, self._inputs, QKV), self._rule, rows)
        return ops.linear(mixed, self._output, DELTA)
