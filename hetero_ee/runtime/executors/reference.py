"""The reference executor: plain torch, fp32, what every other one is checked against."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.blocks import Block, BlockKind, first_matrix, least_activations
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.planning.parts import default_kv_type
from hetero_ee.runtime.executors.executor import HostExecutor
from hetero_ee.weights.model_weights import UNQUANTIZED, ModelWeights
from hetero_ee.weights.weight import Weight


class ReferenceExecutor(HostExecutor):
    """Runs one model in plain torch. cache: see HostExecutor."""

    kv_type = default_kv_type(UNQUANTIZED)  # torch would widen anything else each time

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        max_tokens: int,
        ops: TorchOps | None = None,
        *,
        cache: CpuKvCache | None = None,
    ) -> None:
        super().__init__(spec, weights, max_tokens, cache)
        self._ops = ops or TorchOps()

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Tensor:
        block = self.blocks[0]
        hidden = self._ops.embed(self.weights.matrices[block.tensors["tokens"].name], batch.token_ids)
        hidden = hidden * self.spec.embedding_scale
        positions = self._vector(block, "positions")
        if positions is None:
            return hidden
        return hidden + positions[torch.tensor(batch.positions) + (self.spec.learned_position_offset or 0)]

    @torch.inference_mode()
    def linear(self, x: Tensor, name: str) -> Tensor:
        return self._ops.linear(x, self.weights.matrices[name], self.weights.vectors.get(f"{name}_bias"))

    @torch.inference_mode()
    def product(self, x: Tensor, weight: Weight) -> Tensor:
        return self._ops.linear(x, weight)

    @torch.inference_mode()
    def normed(self, x: Tensor, name: str) -> Tensor:
        return self._ops.norm(x, "rms", self.weights.vectors[name], None, self.spec.norm_eps)

    @torch.inference_mode()
    def attend(self, qkv: Tensor, batch: Batch, block: Block) -> Tensor:
        queries, layer = self._written(block, qkv, batch), block.layer
        assert layer is not None
        spec, window = self.spec, self.spec.sliding_windows[layer]
        scores = spec.attention_scale, spec.attention_cap
        attended = self._ops.attention(queries, self.cache, layer, batch, window, *scores)
        return attended.flatten(1)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        for block in blocks:
            if block.kind is BlockKind.ATTENTION:
                added = self._attend(block, hidden, batch)
            else:
                added = self._feed_forward(block, hidden, batch)
            if block.has_post_norm:
                added = self._normed(block, added, "post_norm")
            hidden = hidden + added * self.spec.residual_scale
        return hidden

    @contextmanager
    def borrowing(self, weights: ModelWeights) -> Iterator[None]:
        own = self.weights
        self.weights = ModelWeights(own.matrices | weights.matrices, own.vectors | weights.vectors)
        try:
            yield
        finally:
            self.weights = own

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        block = self.blocks[-2]
        return self._normed(block, hidden, "norm") if block.kind is BlockKind.FINAL_NORM else hidden

    @torch.inference_mode()
    def lm_head(self, normed: Tensor) -> Tensor:
        return self.finished(self.linear(normed, self.blocks[-1].tensors["tokens"].name))

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        return self._ops.activated(logits, "softcap", cap)

    @torch.inference_mode()
    def sliced_head(self, x: Tensor, token_ids: Tensor) -> Tensor:
        return self.lm_head(x).gather(1, token_ids)

    def _attend(self, block: Block, hidden: Tensor, batch: Batch) -> Tensor:
        attended = self.attend(self._qkv(block, hidden), batch, block)
        return self.linear(attended, block.tensors["output"].name)

    def _qkv(self, block: Block, hidden: Tensor) -> Tensor:
        return self.linear(self._norm(block, hidden), block.tensors["qkv"].name)

    def _written(self, block: Block, qkv: Tensor, batch: Batch) -> Tensor:
        """Queries (m, n_heads, head_dim), turned; keys and values are in the cache then."""
        spec, ops, layer = self.spec, self._ops, block.layer
        assert layer is not None
        queries, keys, values = (
            part.reshape(len(batch), -1, spec.head_dim)
            for part in torch.split(qkv, [spec.query_size, spec.kv_size, spec.kv_size], -1)
        )
        if spec.qk_norm_whole:
            queries, keys = queries.flatten(1), keys.flatten(1)
        if spec.qk_norm:
            queries = ops.norm(queries, "rms", self._vector(block, "query_norm"), None, spec.norm_eps)
            keys = ops.norm(keys, "rms", self._vector(block, "key_norm"), None, spec.norm_eps)
        queries, keys = (part.view(values.shape[0], -1, spec.head_dim) for part in (queries, keys))
        if rope := spec.rope_of(layer):
            place = batch.positions, rope, self.cache.max_tokens
            queries, keys = (ops.rope(part, *place) for part in (queries, keys))
        self.cache.write(layer, batch, keys, values)
        return queries

    def _feed_forward(self, block: Block, hidden: Tensor, batch: Batch) -> Tensor:
        if self.spec.neuron_major:
            return self._summed_neurons(block, self._norm(block, hidden), batch)
        first = block.tensors["gate_up" if self.spec.gated else "up"]
        active = self._ops.activate(self.linear(self._norm(block, hidden), first.name), self.spec)
        return self.linear(active, block.tensors["down"].name)

    def _summed_neurons(self, block: Block, x: Tensor, batch: Batch) -> Tensor:
        first, scores = self.linear(x, block.tensors[first_matrix(self.spec)].name), None
        if self.spec.predictor_rank:
            low = self.linear(x, block.tensors["predictor_in"].name)
            scores = self.linear(low, block.tensors["predictor_out"].name)
            first[torch.from_numpy(batch.may_skip())[:, None] & ~(scores > 0)] = 0.0
        active = self._ops.activate(first, self.spec)
        least = self.weights.vectors.get(least_activations(block))
        if least is not None:
            active[torch.from_numpy(batch.may_skip())[:, None] & (active.abs() < least)] = 0.0
        self._neurons.count(active.numpy(), batch, None if scores is None else scores.numpy())
        up = self.weights.matrices[block.tensors["up"].name] if self.spec.gated else None
        bias = self._vector(block, "down_bias")
        summed = self._ops.neurons(x, active, up, self.weights.matrices[block.tensors["down"].name])
        return summed if bias is None else summed + bias

    def _norm(self, block: Block, x: Tensor) -> Tensor:
        return self._normed(block, x, "norm") if block.has_norm else x

    def _normed(self, block: Block, x: Tensor, short: str) -> Tensor:
        scale, bias = self._vector(block, short), self._vector(block, f"{short}_bias")
        return self._ops.norm(x, self.spec.norm, scale, bias, self.spec.norm_eps)

    def _vector(self, block: Block, short: str) -> Tensor | None:
        tensor = block.tensors.get(short)
        return None if tensor is None else self.weights.vectors[tensor.name]
