"""Attention over a KV cache: grouped heads, sliding windows, rotary positions, and norms of queries and keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hetero_ee.layers.ops import ATTENDED, DELTA, PRODUCT, QKV, Array, Mixer, MixerSpec, Norm, Ops, Parameters, Rows
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
    value_norm: bool = False  # divides each value head by its root mean square
    keys_are_values: bool = False  # values are the keys before their norm and rotation
    query_growth: tuple[float, int] | None = None  # (g, n): a query at position p is multiplied by 1 + g ln(1 + p // n)
    kv_layer: int | None = None  # earlier layer whose keys and values this layer reads; None if it has its own
    is_gated: bool = False  # multiplies the output by sigmoid of gates, which are made like the queries
    has_sinks: bool = False  # a trained score per head takes part in the softmax and has no value

    @property
    def shared_dim(self) -> int | None:
        """Number of features at the end of a cached key that are also its value; None if values are cached, too."""
        return None

    @property
    def attended_dim(self) -> int:
        """Number of features that attention computes per head."""
        return self.shared_dim or self.head_dim

    @property
    def query_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def first_value(self) -> int:
        """First feature of the values that follow queries and keys."""
        return self.query_size + (self.kv_size if self.shared_dim is None else 0)

    @property
    def kv_size(self) -> int:
        """Number of features of all key heads, which is also that of all value heads."""
        return self.n_kv_heads * self.head_dim

    @property
    def gate_size(self) -> int:
        return self.query_size if self.is_gated else 0

    def row_sizes(self, short: str) -> tuple[int, ...]:
        n_computed = 0 if self.kv_layer is not None else 1 if self.keys_are_values else 2
        sizes = self.query_size, *[self.kv_size] * n_computed, *[self.gate_size] * self.is_gated
        return sizes if short == "qkv" else ()

    @property
    def product_size(self) -> int:
        """Number of features that the layer's first matrix computes: queries, its own keys and values, and gates."""
        return sum(self.row_sizes("qkv"))

    def norms(self, query_norm: Norm | None, key_norm: Norm | None, ones: Any) -> list[tuple[Any, int, int]]:
        """Return the scale, the first feature and the number of heads of each norm of queries, keys and values.

        Args:
            ones: the scale of value norms (head_dim,).
        """
        n_queries, n_keys = (1, 1) if self.qk_norm_whole else (self.n_heads, self.n_kv_heads)
        found = [] if query_norm is None else [(query_norm.scale, 0, n_queries)]
        if self.kv_layer is None:
            found += [] if key_norm is None else [(key_norm.scale, self.query_size, n_keys)]
            found += [(ones, self.query_size + self.kv_size, self.n_kv_heads)] if self.value_norm else []
        return found

    @property
    def state(self) -> KvState:
        return KvState(self.n_heads, self.n_kv_heads, self.head_dim, self.window, self.kv_layer, self.shared_dim)

    @property
    def buffers(self) -> dict[str, int]:
        size = self.query_size + 2 * self.kv_size + self.gate_size
        return {QKV: size, ATTENDED: self.query_size} | ({PRODUCT: self.product_size} if self.keys_are_values else {})

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare qkv, whose rows are those of queries, keys, values and gates, the norms, and the output's matrix."""
        tensors.matrix("qkv", self.product_size, hidden_size, bias=self.qkv_bias)
        if self.qk_norm:
            query_size, key_size = (self.query_size, self.kv_size) if self.qk_norm_whole else (self.head_dim,) * 2
            tensors.vector("query_norm", query_size)
            if self.kv_layer is None:
                tensors.vector("key_norm", key_size)
        if self.has_sinks:
            tensors.vector("sinks", self.n_heads)
        tensors.matrix("output", hidden_size, self.query_size, bias=self.output_bias)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> Mixer:
        scales = (parameters.vector(short) for short in ("query_norm", "key_norm"))
        query, key = (None if scale is None else Norm("rms", scale, None, self.norm_eps) for scale in scales)
        heads = ops.heads(self, layer, cache, query, key, parameters.vector("sinks"))
        return Attention(self, parameters.matrix("qkv"), parameters.matrix("output"), heads)


class Attention(Mixer):
    """One layer's attention with its parameters on a device."""

    has_state = True

    def __init__(self, spec: AttentionSpec, qkv: Any, output: Any, heads: Any) -> None:
        self._spec, self._qkv, self._output, self._heads = spec, qkv, output, heads

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        spec = self._spec
        if spec.keys_are_values:
            qkv = ops.append_copy(ops.linear(x, self._qkv, PRODUCT), spec.query_size, QKV)
        else:
            qkv = ops.linear(x, self._qkv, QKV)
        attended = ops.attend(ops.write_kv(qkv, self._heads, rows), self._heads, rows)
        if spec.is_gated:
            attended = ops.gate(attended, qkv[:, -spec.gate_size :])
        return ops.linear(attended, self._output, DELTA)
