"""Per-layer embeddings of Gemma 4's E models: each layer adds a vector for each token, gated by the hidden states.

delta = output(act(gate(x)) * input),  input = (rms_norm(context(e)) + row) / sqrt(2)
with e the token's embedding and row the layer's part of the token's row in a table. Source: transformers'
Gemma4TextModel. The table has more bytes than all other weights together, and a token reads one row of it. So it stays
in the host's memory or file, and the rows of a pass's tokens are copied to the device.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hetero_ee.layers.ops import DELTA, INNER, Activation, Array, Mixer, MixerSpec, Norm, Ops, Parameters, Rows
from hetero_ee.layers.tensors import TensorRole, Tensors, TensorSpec

EMBEDDED, TABLE_ROWS, CONTEXT = "embedded", "table_rows", "context"  # buffers


@dataclass(frozen=True, slots=True)
class LayerTableSpec:
    """Sizes of the table, which has a row per token with a part for each layer."""

    n_rows: int
    n_layers: int
    size: int  # features of a layer's part

    @property
    def width(self) -> int:
        return self.n_layers * self.size

    def forward(self, ops: Ops, parameters: Parameters, batch: Any) -> Array:
        """Look up the tokens' rows (m, width)."""
        rows = ops.embed(parameters.matrix("tokens"), batch, self.width, None, 0)
        return ops.scale(rows, self.size**0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerSpec(MixerSpec):
    """Parameters of one layer's input by tokens."""

    name: ClassVar[str] = "per_layer"
    reads_norm: ClassVar[bool] = False

    table: LayerTableSpec
    hidden_size: int
    activation: Activation
    norm_eps: float

    @property
    def buffers(self) -> dict[str, int]:
        own = dict.fromkeys((INNER, CONTEXT), self.table.size)
        return own | {EMBEDDED: self.hidden_size, TABLE_ROWS: self.table.width}

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        for short in ("context", "gate"):
            tensors.matrix(short, self.table.size, hidden_size)
        # All layers share this norm.
        tensors.declared["context_norm"] = TensorSpec("table.context_norm", TensorRole.VECTOR, (self.table.size,))
        tensors.matrix("output", hidden_size, self.table.size)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> "PerLayer":
        # Gemma 4 divides the product by sqrt(hidden_size) before its norm. Here the norm's epsilon grows instead.
        norm = Norm("rms", parameters.vector("context_norm"), None, self.norm_eps * self.hidden_size)
        matrices = {short: parameters.matrix(short) for short in ("context", "gate", "output")}
        return PerLayer(self, matrices, norm, slice(layer * self.table.size, (layer + 1) * self.table.size))


class PerLayer(Mixer):
    """One layer's input by tokens with its parameters on a device."""

    reads_tokens = True

    def __init__(self, spec: PerLayerSpec, matrices: dict[str, Any], norm: Norm, part: slice) -> None:
        self._activation, self._matrices, self._norm, self._part = spec.activation, matrices, norm, part

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        embedded, table_rows = rows.inputs
        context = ops.norm_in_place(ops.linear(embedded, self._matrices["context"], CONTEXT), self._norm)
        given = ops.scale(ops.add(context, table_rows[:, self._part]), 0.5**0.5)
        gate = ops.activate(ops.linear(x, self._matrices["gate"], INNER), self._activation)
        return ops.linear(ops.multiply(gate, given), self._matrices["output"], DELTA)
