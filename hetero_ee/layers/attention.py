"""Attention over a KV cache: grouped heads, sliding windows, rotary positions, and norms of queries and keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hetero_ee.layers.ops import ATTENDED, DELTA, QKV, Array, Mixer, MixerSpec, Norm, Ops, Parameters, Rows
from hetero_ee.layers.rope import RopeSpec
from hetero_ee.layers.state import KvState
from hetero_ee.layers.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(MixerSpec):
    """Parameters of one layer's attention, such as its numbers of heads.

    The layer's KV cache keeps one key and one value per token. A rollback forgets the last tokens.
    """

    name: ClassVar[str] = "attention"

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int | None  # positions that a token sees, its own included; None for all
    rope: RopeSpec | None  # rotates queries and keys
    scale: float | None  # factor of scores; None means 1 / sqrt(head_dim)
    cap: float  # limit of scores, applied by tanh; 0 for none
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    qk_norm_whole: bool  # norms all heads together instead of each head
    norm_eps: float

    @property
    def query_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of features of all key heads, which is also that of all value heads."""
        return self.n_kv_heads * self.head_dim

    @property
    def state(self) -> KvState:
        return KvState(self.n_heads, self.n_kv_heads, self.head_dim, self.window)

    @property
    def buffers(self) -> dict[str, int]:
        return {QKV: self.query_size + 2 * self.kv_size, ATTENDED: self.query_size}

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare qkv, whose rows are those of queries, keys and values, the norms, and the output's matrix."""
        tensors.matrix("qkv", self.query_size + 2 * self.kv_size, hidden_size, bias=self.qkv_bias)
        if self.qk_norm:
            query_size, key_size = (self.query_size, self.kv_size) if self.qk_norm_whole else (self.head_dim,) * 2
            tensors.vector("query_norm", query_size)
            tensors.vector("key_norm", key_size)
        tensors.matrix("output", hidden_size, self.query_size, bias=self.output_bias)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> "Attention":
        query_norm, key_norm = (
            Norm("rms", parameters.vector(short), None, self.norm_eps) if self.qk_norm else None
            for short in ("query_norm", "key_norm")
        )
        heads = ops.heads(self, layer, cache, query_norm, key_norm)
        return Attention(parameters.matrix("qkv"), parameters.matrix("output"), heads)


class Attention(Mixer):
    """One layer's attention with its parameters on a device."""

    has_state = True

    def __init__(self, qkv: Any, output: Any, heads: Any) -> None:
        self._qkv, self._output, self._heads = qkv, output, heads

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        queries = ops.write_kv(ops.linear(x, self._qkv, QKV), self._heads, rows)
        return ops.linear(ops.attend(queries, self._heads, rows), self._output, DELTA)
