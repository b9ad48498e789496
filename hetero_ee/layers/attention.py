"""Attention over a KV cache: grouped heads, sliding windows, rotary positions and norms of queries and keys."""

from typing import Any

from hetero_ee.layers.ops import DELTA, QKV, Array, Mixer, Norm, Ops, Parameters, Rows
from hetero_ee.models.spec import AttentionSpec


class Attention(Mixer):
    """The attention of one layer on a device.

    Its state is one key and one value per token, kept by the layer's KV cache. Rolling back forgets the last tokens.
    """

    has_state = True

    def __init__(
        self, ops: Ops, spec: AttentionSpec, parameters: Parameters, layer: int, cache: Any, norm_eps: float
    ) -> None:
        self._qkv, self._output = parameters.matrix("qkv"), parameters.matrix("output")
        query_norm, key_norm = (
            Norm("rms", parameters.vector(short), None, norm_eps) if spec.qk_norm else None
            for short in ("query_norm", "key_norm")
        )
        self._heads = ops.heads(spec, layer, cache, query_norm, key_norm)

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        """Attend the tokens, whose normed states are x (m, hidden): what to add to the hidden states."""
        queries = ops.write_kv(ops.linear(x, self._qkv, QKV), self._heads, rows)
        return ops.linear(ops.attend(queries, self._heads, rows), self._output, DELTA)
