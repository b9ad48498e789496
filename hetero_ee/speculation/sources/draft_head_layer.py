"""An EAGLE-1 draft head (arXiv 2401.15077): its weights, and what it computes, in plain torch.

From the newest token's embedding e and the final normed state h that led to it, x = fc [e; h] passes one Llama layer
without input norm: x += attention(x), then x += ffn(norm(x)). What comes out is a guess of the next such state h.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.kv.cpu import CpuKvCache
from hetero_ee.runtime.torch_ops import TorchOps
from hetero_ee.weights.weight import DenseWeight


@dataclass(frozen=True, slots=True, eq=False)
class DraftHeadWeights:
    """fp32 matrices (out, in), d the hidden size. qkv, gate_up: parts stacked row after row, as in models/blocks.py.

    spec: the layer's shape; it has one layer. fc: (d, 2d). embedding: (vocab, d), None for the model's own.
    draft_token_ids: the tokens (k,) it drafts, ascending int64, None for all.
    """

    spec: ModelSpec
    fc: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    fc_bias: Tensor | None = None
    qkv_bias: Tensor | None = None
    embedding: Tensor | None = None
    draft_token_ids: Tensor | None = None


class DraftHeadLayer(Protocol):
    """Computes a head. A row's bits depend on that row and its sequence alone."""

    @property
    def cache(self) -> CpuKvCache:
        """Keys and values of its one layer."""
        ...

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """The next states, (m, d) fp32: of the tokens' embeddings and the states before them, (m, d) each."""
        ...

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """(m, d) by the head's own embedding; None where it has none."""
        ...

    def logits(self, states: Tensor) -> Tensor | None:
        """Of the draft vocabulary, (m, k), where the head has one."""
        ...


class TorchDraftHeadLayer:
    """The reference, fp32, for models on the reference executor. head: rows of the model's for the draft vocabulary."""

    def __init__(self, weights: DraftHeadWeights, max_tokens: int, head: Tensor | None = None) -> None:
        spec = weights.spec
        self.cache = CpuKvCache(1, spec.n_kv_heads, spec.head_dim, max_tokens)
        self._weights, self._spec, self._ops = weights, spec, TorchOps()
        self._head = None if head is None else DenseWeight(head)

    @torch.inference_mode()
    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """See DraftHeadLayer.guess."""
        self.cache.admit(batch)
        x = self._linear(torch.cat([embedded, states], -1), self._weights.fc, self._weights.fc_bias)
        x = x + self._linear(self._attended(x, batch).flatten(1), self._weights.output)
        normed = self._ops.norm(x, "rms", self._weights.norm, None, self._spec.norm_eps)
        active = self._ops.activate(self._linear(normed, self._weights.gate_up), self._spec)
        return x + self._linear(active, self._weights.down)

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """See DraftHeadLayer.embed."""
        embedding = self._weights.embedding
        return None if embedding is None else embedding[torch.tensor(token_ids)]

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor | None:
        """See DraftHeadLayer.logits."""
        return None if self._head is None else self._ops.linear(states, self._head)

    def _attended(self, x: Tensor, batch: Batch) -> Tensor:
        spec = self._spec
        qkv = self._linear(x, self._weights.qkv, self._weights.qkv_bias)
        queries, keys, values = (
            part.reshape(len(batch), -1, spec.head_dim)
            for part in torch.split(qkv, [spec.query_size, spec.kv_size, spec.kv_size], -1)
        )
        if spec.rope:
            queries, keys = (self._ops.rope(part, batch.positions, spec.rope) for part in (queries, keys))
        self.cache.write(0, batch, keys, values)
        return self._ops.attention(queries, self.cache, 0, batch, spec.sliding_windows[0])

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._ops.linear(x, DenseWeight(weight), bias)
