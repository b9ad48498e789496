"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all keys and values come from a small latent vector.

    latent = norm(kv_down x), key_h = key_up_h^T latent, value_h = value_up_h latent
    query_h = rows of head h of query x, or of query norm(query_down x)

A part of each query rotates, and meets one rotated key that all heads share, key x. The cache keeps only that key and
the latent vector (section 2.1.2 of the paper: key_up and value_up are absorbed): key_h query_h = latent (key_up_h
query_h), and the weighted sum of values is value_up_h times that of latent vectors. So all heads share one key of the
cache, whose last features are also its value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_ee.layers.attention import AttentionSpec
from hetero_ee.layers.ops import ATTENDED, DELTA, PRODUCT, QKV, Array, Mixer, Norm, Ops, Parameters, Rows
from hetero_ee.layers.rope import halves_of_pairs
from hetero_ee.layers.tensors import Tensors

LATENT, SHARED_KEY, BY_HEAD = "latent", "shared_key", "by_head"  # buffers
KEY_UP, VALUE_UP = "key_up", "value_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Parameters of one layer's latent attention. There is one key head; `head_dim` is the size of a cached key."""

    query_rank: int | None  # features of the queries' latent vector; None if queries are computed from x
    kv_rank: int  # features of the latent vector of keys and values
    plain_dim: int  # features of a head's key that don't rotate
    value_dim: int  # features of a head's value

    @property
    def shared_dim(self) -> int | None:
        return self.kv_rank

    @property
    def query(self) -> str:
        """Short name of the matrix that computes the queries."""
        return "query" if self.query_rank is None else "query_up"

    @property
    def rope_dim(self) -> int:
        """Number of a head's features that rotate."""
        return self.head_dim - self.kv_rank

    @property
    def buffers(self) -> dict[str, int]:
        sizes = {QKV: self.query_size + self.head_dim, ATTENDED: self.n_heads * self.kv_rank}
        sizes |= {PRODUCT: self.n_heads * (self.rope_dim + self.plain_dim), SHARED_KEY: self.rope_dim}
        sizes |= {BY_HEAD: self.n_heads * max(self.kv_rank, self.value_dim)}
        return sizes | {LATENT: max(self.kv_rank, self.query_rank or 0)}

    def picked_rows(self, short: str) -> Sequence[tuple[int, Sequence[int]]]:
        assert self.rope is not None, "a part of each head rotates"
        n, n_plain, rank, n_up = self.rope_dim, self.plain_dim, self.kv_rank, self.plain_dim + self.value_dim
        turning = halves_of_pairs(n) if self.rope.interleaved else range(n)
        rotating = [(n_plain + n, [n_plain + row for row in turning]), (n_plain + n, range(n_plain))]
        found: dict[str, Sequence[tuple[int, Sequence[int]]]] = {
            self.query: rotating,
            "kv_down": [(rank + n, range(rank))],
            "key": [(rank + n, [rank + row for row in turning])],
            KEY_UP: [(n_up, range(n_plain))],
            VALUE_UP: [(n_up, range(n_plain, n_up))],
        }
        return found.get(short, ())

    def declare(self, tensors: Tensors, hidden_size: int) -> None:
        """Declare the matrices of queries, of the shared key, of the latent vector and of the output, and two norms.

        In the queries' matrix, the rotating rows of all heads come first. key_up holds each head's matrix (kv_rank,
        plain_dim), and value_up each head's (value_dim, kv_rank).
        """
        if self.query_rank is not None:
            tensors.matrix("query_down", self.query_rank, hidden_size)
            tensors.vector("query_norm", self.query_rank)
        query_size = self.n_heads * (self.rope_dim + self.plain_dim)
        tensors.matrix(self.query, query_size, self.query_rank or hidden_size)
        tensors.matrix("key", self.rope_dim, hidden_size)
        tensors.matrix("kv_down", self.kv_rank, hidden_size)
        tensors.vector("kv_norm", self.kv_rank)
        tensors.matrix(KEY_UP, self.n_heads * self.kv_rank, self.plain_dim)
        tensors.matrix(VALUE_UP, self.n_heads * self.value_dim, self.kv_rank)
        tensors.matrix("output", hidden_size, self.n_heads * self.value_dim)

    def bind(self, ops: Ops, parameters: Parameters, layer: int, cache: Any) -> Mixer:
        return LatentAttention(self, parameters, ops.heads(self, layer, cache, None, None))


class LatentAttention(Mixer):
    """One layer's latent attention with its parameters on a device."""

    has_state = True

    def __init__(self, spec: LatentAttentionSpec, parameters: Parameters, heads: Any) -> None:
        self._spec, self._heads, matrix = spec, heads, parameters.matrix
        self._query, self._key, self._output = matrix(spec.query), matrix("key"), matrix("output")
        self._kv_down, self._key_up, self._value_up = matrix("kv_down"), matrix(KEY_UP), matrix(VALUE_UP)
        self._kv_norm = Norm("rms", parameters.vector("kv_norm"), None, spec.norm_eps)
        self._query_down = None if spec.query_rank is None else matrix("query_down")
        self._query_norm = Norm("rms", parameters.vector("query_norm"), None, spec.norm_eps)

    def forward(self, ops: Ops, x: Array, rows: Rows) -> Array:
        attended = ops.attend(ops.write_kv(self._qkv(ops, x), self._heads, rows), self._heads, rows)
        values = ops.linear_by_head(attended, self._value_up, self._spec.n_heads, BY_HEAD)
        return ops.linear(values, self._output, DELTA)

    def _qkv(self, ops: Ops, x: Array) -> Array:
        """Return all heads' queries of cached keys, then the key to cache: (m, (n_heads + 1) head_dim)."""
        spec, m, inputs = self._spec, len(x), x
        n, n_rotating = spec.rope_dim, spec.n_heads * spec.rope_dim
        qkv = ops.empty(m, spec.query_size + spec.head_dim, QKV)
        heads = qkv.reshape(m, spec.n_heads + 1, spec.head_dim)
        if self._query_down is not None:
            inputs = ops.norm_in_place(ops.linear(x, self._query_down, LATENT), self._query_norm)
        query = ops.linear(inputs, self._query, PRODUCT)
        heads[:, :-1, :n] = query[:, :n_rotating].reshape(m, spec.n_heads, n)
        plain = ops.linear_by_head(query[:, n_rotating:], self._key_up, spec.n_heads, BY_HEAD)
        heads[:, :-1, n:] = plain.reshape(m, spec.n_heads, spec.kv_rank)
        heads[:, -1, :n] = ops.linear(x, self._key, SHARED_KEY)
        heads[:, -1, n:] = ops.norm_in_place(ops.linear(x, self._kv_down, LATENT), self._kv_norm)
        return qkv
