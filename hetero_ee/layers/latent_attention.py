"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are computed from a small latent vector.

    latent = norm(kv_down x), [key_h | value_h] = rows of head h of kv_up latent
    query_h = rows of head h of query x, or of query norm(query_down x)

A part of each query rotates, and meets one rotated key that all heads share, key x. The cache keeps whole keys and
values of each head, so that attention is the usual one: a head's rotating features come first, and a value that is
shorter than a key is followed by zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.ops import ATTENDED, DELTA, PRODUCT, QKV, Array, Mixer, Norm, Ops, Parameters, Rows
from hetero_ee.layers.rope import halves_of_pairs
from hetero_ee.layers.tensors import Tensors

LATENT, SHARED_KEY = "latent", "shared_key"  # buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Parameters of one layer's latent attention. `head_dim` is the size of a query and of a key."""

    query_rank: int | None  # features of the queries' latent vector; None if queries are computed from x
    kv_rank: int  # features of the latent vector of keys and values
    value_dim: int  # features of a head's value, at most head_dim

    @property
    def query(self) -> str:
        """Short name of the matrix that computes the queries."""
        return "query" if self.query_rank is None else "query_up"

    @property
    def rope_dim(self) -> int:
        """Number of a head's features that rotate."""
        assert self.rope is not None, "a part of each head rotates"
        return self.rope.n_features

    @property
    def up_dim(self) -> int:
        """Number of a head's features that the latent vector gives: those of its key that don't rotate, and a value."""
        return self.head_dim - self.rope_dim + self.value_dim

    @property
    def buffers(self) -> dict[str, int]:
        product = self.n_heads * max(self.up_dim, self.head_dim)
        sizes = {QKV: 3 * self.query_size, ATTENDED: self.query_size, PRODUCT: product, SHARED_KEY: self.rope_dim}
        return sizes | {LATENT: max(self.kv_rank, self.query_rank or 0)}

    def picked_rows(self, short: str) -> Sequence[tuple[int, Sequence[int]]]:
        assert self.rope is not None, "a part of each head rotates"
        n, n_plain, rank = self.rope_dim, self.head_dim - self.rope_dim, self.kv_rank
        turning = halves_of_pairs(n) if self.rope.interleaved else range(n)
        head = [*(n_plain + row for row in turning), *range(n_plain)]
        key = [rank + row for row in turning]
        found = {self.query: (self.head_dim, head), "kv_down": (rank + n, range(rank)), "key": (rank + n, key)}
        return [found[short]] if short in found else []

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare the matrices of queries, of the shared key, of keys and values, and the output's, and two norms."""
        if self.query_rank is not None:
            tensors.matrix("query_down", self.query_rank, hidden_size)
            tensors.vector("query_norm", self.query_rank)
        tensors.matrix(self.query, self.query_size, self.query_rank or hidden_size)
        tensors.matrix("key", self.rope_dim, hidden_size)
        tensors.matrix("kv_down", self.kv_rank, hidden_size)
        tensors.vector("kv_norm", self.kv_rank)
        tensors.matrix("kv_up", self.n_heads * self.up_dim, self.kv_rank)
        tensors.matrix("output", hidden_size, self.n_heads * self.value_dim)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> Mixer:
        return LatentAttention(self, parameters, ops.heads(self, layer, cache, None, None))


class LatentAttention(Mixer):
    """One layer's latent attention with its parameters on a device."""

    has_state = True

    def __init__(self, spec: LatentAttentionSpec, parameters: Parameters, heads: Any) -> None:
        self._spec, self._heads, matrix = spec, heads, parameters.matrix
        self._query, self._key, self._output = matrix(spec.query), matrix("key"), matrix("output")
        self._kv_down, self._kv_up = matrix("kv_down"), matrix("kv_up")
        self._kv_norm = Norm("rms", parameters.vector("kv_norm"), None, spec.norm_eps)
        self._query_down = None if spec.query_rank is None else matrix("query_down")
        self._query_norm = Norm("rms", parameters.vector("query_norm"), None, spec.norm_eps)

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        attended = ops.attend(ops.write_kv(self._qkv(ops, x), self._heads, rows), self._heads, rows)
        return ops.linear(self._values(ops, attended), self._output, DELTA)

    def _qkv(self, ops: Ops, x: Array) -> Array:
        """Return whole queries, keys and values of all heads: (m, 3 n_heads head_dim)."""
        spec, m, inputs = self._spec, len(x), x
        n, n_plain = spec.rope_dim, spec.head_dim - spec.rope_dim
        qkv = ops.empty(m, 3 * spec.query_size, QKV)
        heads = qkv.reshape(m, 3, spec.n_heads, spec.head_dim)
        if self._query_down is not None:
            inputs = ops.norm_in_place(ops.linear(x, self._query_down, LATENT), self._query_norm)
        heads[:, 0] = ops.linear(inputs, self._query, PRODUCT).reshape(m, spec.n_heads, spec.head_dim)
        heads[:, 1, :, :n] = ops.linear(x, self._key, SHARED_KEY)[:, None]
        latent = ops.norm_in_place(ops.linear(x, self._kv_down, LATENT), self._kv_norm)
        up = ops.linear(latent, self._kv_up, PRODUCT).reshape(m, spec.n_heads, spec.up_dim)
        heads[:, 1, :, n:], heads[:, 2, :, : spec.value_dim] = up[:, :, :n_plain], up[:, :, n_plain:]
        heads[:, 2, :, spec.value_dim :] = 0
        return qkv

    def _values(self, ops: Ops, attended: Array) -> Array:
        """Return the heads' outputs without the zeros that follow values."""
        spec, m = self._spec, len(attended)
        if spec.value_dim == spec.head_dim:
            return attended
        values = ops.empty(m, spec.n_heads * spec.value_dim, PRODUCT)
        heads = attended.reshape(m, spec.n_heads, spec.head_dim)
        values.reshape(m, spec.n_heads, spec.value_dim)[:] = heads[:, :, : spec.value_dim]
        return values
