"""A draft head on the CPU kernels: its matrices in tiles, quantized as the model's are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.kv.cache import KvCache
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadWeights
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, EightBit, quantizer_named
from hetero_ee.weights.weight import TileWeight, Weight
from hetero_ee_cpu_ops.activate import activate
from hetero_ee_cpu_ops.attention import Attention
from hetero_ee_cpu_ops.kv_table import SequenceCache, kv_table
from hetero_ee_cpu_ops.kv_write import KvWrite
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.norm import rms_norm
from hetero_ee_cpu_ops.rope import Rope
from hetero_ee_cpu_ops.thread_pool import ThreadPool

KV_KIND = "fp32"


@dataclass(frozen=True, slots=True)
class _Linear:
    """A matrix in tiles with its bias, None or fp32 (N,)."""

    matrix: TileMatrix
    n_rows: int
    bias: Any


class CpuDraftHeadLayer:
    """See DraftHeadLayer. pool: the threads, the caller's to close. head: rows of the model's for the draft vocabulary.

    weights: finite, as those from a file are. quantizer: of the matrices; head and embedding are int8, as the model's.
    """

    def __init__(
        self,
        weights: DraftHeadWeights,
        max_tokens: int,
        pool: ThreadPool,
        head: Weight | None = None,
        quantizer: str = DEFAULT_QUANTIZER,
    ) -> None:
        spec = weights.spec
        self.cache = KvCache(1, spec.n_kv_heads, spec.head_dim, max_tokens, kind=KV_KIND)
        self._spec, self._pool, self._matmul, self._quantizer = spec, pool, Matmul(pool), quantizer
        self._cache_shape = shape = (1, spec.n_kv_heads, spec.head_dim)
        self._kv_write = KvWrite(*shape, KV_KIND)
        self._attention = Attention(1, spec.n_heads, *shape[1:], KV_KIND, pool)
        self._rope = Rope(spec.rope.inverse_frequencies(), spec.rope.scaling.magnitude) if spec.rope else None
        self._fc = self._linear(weights.fc, weights.fc_bias)
        self._qkv = self._linear(weights.qkv, weights.qkv_bias)
        self._output, self._down = self._linear(weights.output), self._linear(weights.down)
        self._gate_up = self._linear(weights.gate_up)
        self._norm = weights.norm.numpy()
        self._embedding = None if weights.embedding is None else EightBit().quantize(weights.embedding)
        self._head = None if head is None else _head_of(head)

    def guess(self, embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        """See DraftHeadLayer.guess."""
        self.cache.admit(batch)
        spec = self._spec
        x = self._multiplied(np.concatenate([embedded.numpy(), states.numpy()], axis=1), self._fc)
        delta = self._multiplied(self._attended(x, batch), self._output)
        normed = rms_norm(x, self._norm, spec.norm_eps, delta=delta)
        inner, kind = self._multiplied(normed, self._gate_up), spec.activation
        active = activate(inner, kind, gated=True, threshold=spec.activation_threshold, pool=self._pool)
        return torch.from_numpy(x + self._multiplied(active, self._down))

    def embed(self, token_ids: list[int]) -> Tensor | None:
        """See DraftHeadLayer.embed."""
        return None if self._embedding is None else self._embedding.rows(torch.tensor(token_ids))

    def logits(self, states: Tensor) -> Tensor | None:
        """See DraftHeadLayer.logits."""
        return None if self._head is None else torch.from_numpy(self._multiplied(states.numpy(), self._head))

    def _attended(self, x: Any, batch: Batch) -> Any:
        spec = self._spec
        qkv = self._multiplied(x, self._qkv)
        if self._rope:
            self._rope.turn(qkv, np.array(batch.positions, np.int64), 0, spec.n_heads + spec.n_kv_heads, spec.head_dim)
        caches = [self.cache.view(sequence, _sequence_cache) for sequence in batch.sequences]
        places = kv_table(caches, batch.positions, self._cache_shape, KV_KIND)
        self._kv_write.write(qkv, places, 0, spec.query_size, spec.query_size + spec.kv_size)
        return self._attention.attend(qkv, places, 0, spec.sliding_windows[0])

    def _multiplied(self, x: Any, linear: _Linear) -> Any:
        """x W^T + bias, fp32 (m, N), contiguous."""
        product = self._matmul(x, linear.matrix)
        if product.shape[1] != linear.n_rows:
            product = np.ascontiguousarray(product[:, : linear.n_rows])
        if linear.bias is not None:
            product += linear.bias
        return product

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> _Linear:
        return _tiled(quantizer_named(self._quantizer), weight, bias)


def _tiled(quantizer: Any, weight: Tensor, bias: Tensor | None) -> _Linear:
    return _linear_of(quantizer.quantize(weight), bias)


def _head_of(head: Weight) -> _Linear:
    """As the model holds it, in 8 bits where that is dense."""
    return _linear_of(head if isinstance(head, TileWeight) else EightBit().quantize(head.dequantize()), None)


def _linear_of(tiles: TileWeight, bias: Tensor | None) -> _Linear:
    matrix = TileMatrix(tiles.tiles.numpy(), tiles.scales.numpy(), tiles.exponent, tiles.codebook)
    return _Linear(matrix, tiles.n_rows, None if bias is None else bias.numpy())


def _sequence_cache(*parts: Tensor) -> SequenceCache:
    return SequenceCache(*(part.numpy() for part in parts))
