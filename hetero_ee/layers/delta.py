"""Gated delta rule: linear attention whose state is a matrix per value head (arXiv 2412.06464; Qwen3-Next, Qwen3.5).

A causal convolution and SiLU mix each channel of queries, keys and values with its last inputs. Queries and keys are
divided by their lengths. A token with key k and value v then replaces what the matrix S returns for k:

    decay = exp(-exp(a_log) softplus(a + dt_bias)),  beta = sigmoid(b)
    delta = (v - decay S^T k) beta,  S' = decay S + k delta^T,  output = S'^T q = decay S^T q + delta (k q)

Prompts are computed in the same way, token by token, so that no bit depends on how a prompt is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from hetero_ee.layers.ops import (
    ATTENDED,
    DELTA,
    GATES,
    MIXED,
    QKV,
    Array,
    Mixer,
    MixerSpec,
    Norm,
    Ops,
    Parameters,
    Rows,
)
from hetero_ee.layers.state import RecurrentState
from hetero_ee.layers.tensors import TensorRole, Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(MixerSpec):
    """Parameters of one layer's gated delta rule."""

    name: ClassVar[str] = "delta"

    n_key_heads: int
    n_value_heads: int
    key_dim: int  # features of a key head
    value_dim: int  # features of a value head
    kernel: int  # tokens that the convolution sees
    norm_eps: float
    is_tiled: bool  # value head v reads key head v mod n_key_heads; otherwise adjacent value heads share a key head

    @property
    def value_size(self) -> int:
        return self.n_value_heads * self.value_dim

    @property
    def n_channels(self) -> int:
        """Number of features of all queries, keys and values."""
        return 2 * self.n_key_heads * self.key_dim + self.value_size

    @property
    def heads(self) -> tuple[int, int, int, int]:
        return self.n_key_heads, self.n_value_heads, self.key_dim, self.value_dim

    @property
    def state(self) -> RecurrentState:
        return RecurrentState(*self.heads, self.n_channels, self.kernel)

    @property
    def buffers(self) -> dict[str, int]:
        sizes = {QKV: self.n_channels + self.value_size, GATES: 2 * self.n_value_heads, ATTENDED: self.value_size}
        return sizes | {MIXED: self.n_channels + sizes[GATES]}

    def picked_rows(self, short: str) -> Sequence[tuple[int, Sequence[int]]]:
        """See MixerSpec. A key head's rows of all parts are together."""
        n_values = self.n_value_heads // self.n_key_heads
        values = n_values * self.value_dim
        sizes = {"input": (self.key_dim, self.key_dim, values, values), "gates": (n_values, n_values)}.get(short, ())
        return [(sum(sizes), range(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def row_sizes(self, short: str) -> tuple[int, ...]:
        return (self.n_channels, self.value_size) if short == "input" else ()

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare input, whose rows are those of queries, keys, values and output gates, and the other parameters.

        Rows of `gates`, which have 8 bits, are those of beta and then of decay, one per value head.
        """
        tensors.matrix("input", self.n_channels + self.value_size, hidden_size)
        tensors.matrix("gates", 2 * self.n_value_heads, hidden_size, role=TensorRole.MATRIX_8)
        tensors.vector("conv", self.n_channels, self.kernel)
        tensors.vector("a_log", self.n_value_heads)
        tensors.vector("dt_bias", self.n_value_heads)
        tensors.vector("gated_norm", self.value_dim)
        tensors.matrix("output", hidden_size, self.value_size)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> Mixer:
        vectors = parameters.vector("conv"), parameters.vector("a_log"), parameters.vector("dt_bias")
        norm = Norm("rms", parameters.vector("gated_norm"), None, self.norm_eps)
        rule = ops.delta_rule(self, layer, cache, vectors, norm)
        return GatedDelta(parameters.matrix("input"), parameters.matrix("gates"), parameters.matrix("output"), rule)


class GatedDelta(Mixer):
    """One layer's gated delta rule with its parameters on a device."""

    has_state = True

    def __init__(self, inputs: Any, gates: Any, output: Any, rule: Any) -> None:
        self._inputs, self._gates, self._output, self._rule = inputs, gates, output, rule

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        inputs, gates = ops.linear(x, self._inputs, QKV), ops.linear(x, self._gates, GATES)
        return ops.linear(ops.gated_delta(inputs, gates, self._rule, rows), self._output, DELTA)
