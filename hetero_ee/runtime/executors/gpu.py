"""The executor of a GPU: blocks with resident weights, blocks with borrowed (streamed) weights, and the head.

The host waits for the GPU only in `attend_uploaded` and `neurons`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.devices import GpuCache, KvShape, kv_layers
from hetero_ee.kv.gpu import VisitingCache
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.layers.ops import LOGITS, Norm
from hetero_ee.layers.state import KvState
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.arena import Arena
from hetero_ee.ops.device_weights import DeviceWeights
from hetero_ee.ops.gpu import GpuOps
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.ops.token_inputs import TokenInputs
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.runtime.draft_logits import DraftLogits
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.executors.executor import BlockExecutor, HostExecutor, SplitFfn
from hetero_ee.runtime.gpu.draft_end import GpuDraftEnd
from hetero_ee.runtime.gpu.segment import GpuResources, GpuSegment, entered, recorder_for
from hetero_ee.runtime.gpu.split import GpuMoeSplit, GpuNeuronSplit, GpuSplit
from hetero_ee.weights.model_weights import ModelWeights


class GpuExecutor(BlockExecutor):
    """Runs quantized blocks on a GPU.

    Args:
        blocks: the blocks whose weights stay on the GPU.
        cache: KV cache of the layers whose attention stays on the GPU.
        n_rows: maximum rows of one pass, see Arena.
        visits: type of keys and values that are uploaded from the CPU's cache for prompts; None if none are.
    """

    cache: GpuCache

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        blocks: Iterable[Block],
        cache: GpuCache,
        operations: GpuOperations,
        n_rows: int,
        visits: str | None = None,
    ) -> None:
        self._spec, self._model_blocks = spec, decoder_blocks(spec)
        self.cache, self._device, self._operations = cache, cache.device, operations
        self._ops = GpuOps(operations, self._device)
        self._resident = DeviceWeights(self._ops, weights, blocks)
        self._arena = Arena(spec, cache, n_rows)
        self._recorder = recorder_for(self._device, operations)
        inputs = _token_inputs(spec, weights, self._model_blocks)
        self._resources = GpuResources(cache, operations, self._recorder, self._arena, inputs)
        self._visiting = {
            shape: VisitingCache(shape, cache.max_tokens, visits, self._device, n_rows)
            for shape in kv_layers(spec)
            if visits and shape.n_kv_heads
        }
        self._segments: dict[tuple[str, ...], GpuSegment] = {}
        self._splits: dict[str, GpuSplit] = {}
        self._ends: dict[DraftEnd, GpuDraftEnd] = {}
        self._borrowed: dict[tuple[str, int], tuple[ModelWeights, GpuSegment]] = {}

    def close(self) -> None:
        """Free the GPU memory, even if this object is still referenced."""
        self._segments.clear()
        self._splits.clear()
        self._ends.clear()
        self._borrowed.clear()
        self._resident.release()
        for cache in (self.cache, *self._visiting.values()):
            cache.release()

    @torch.inference_mode()
    def embed(self, batch: Batch) -> Tensor:
        """Return the states before the first layer, by an embedding on the GPU, without waiting for them."""
        with entered(self._device):
            found: Tensor = self._spec.embedding.forward(self._ops, self._resident.of(self._model_blocks[0]), batch)
        return found

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        return self._segment(blocks).run(hidden, batch)

    def split(self, block: Block, n_first: int) -> SplitFfn:
        if block.name not in self._splits:
            split = GpuMoeSplit if isinstance(block.mixer, MoeSpec) else GpuNeuronSplit
            self._splits[block.name] = split(self._spec, self._resident, block, n_first, self._resources)
        return self._splits[block.name]

    @torch.inference_mode()
    def normed(self, x: Tensor, name: str) -> Tensor:
        norm = Norm("rms", self._resident.vectors[name], None, self._spec.norm_eps)
        return self._ops.add_norm(self._whole(x), None, norm)

    def mix(self, x: Tensor, batch: Batch, block: Block) -> Tensor:
        return self._segment([block]).mix(x, batch)

    def forward_with(self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights) -> Tensor:
        """Run one block with borrowed weights. The same weights object must always hold the same block."""
        return self._borrowed_segment(block, weights, self.cache).run(hidden, batch)

    @torch.inference_mode()
    def attend_uploaded(
        self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights, owner: HostExecutor
    ) -> Tensor:
        """Run one attention block with uploaded keys and values, sequence by sequence. The host waits for each."""
        layer, state = block.layer, block.state
        if not self._visiting or layer is None or not isinstance(state, KvState) or state.source is not None:
            raise ValueError(f"{block.name} has no keys and values that could visit here.")
        visiting = self._visiting[KvShape.of(state)]
        segment = self._borrowed_segment(block, weights, visiting)
        held = cast(CpuKvCache, owner.cache.part(layer))
        out = torch.empty(hidden.shape, device=self._device)
        for sequence, mine in batch.by_sequence().items():
            n_known, n_rows = batch.slots[mine[0]], len(mine)
            here = visiting.bring(held, layer, sequence, n_known, n_rows)
            if batch.paths:
                positions, paths = zip(*((batch.positions[row], batch.paths[row]) for row in mine), strict=True)
                here = replace(here, positions=positions, paths=paths)
            out[mine] = segment.run(hidden[mine], here)
            visiting.take_back(held, layer, sequence, n_known, n_known + n_rows)
        return out

    @torch.inference_mode()
    def linear(self, x: Tensor, name: str) -> Tensor:
        return self._ops.linear(self._whole(x), self._resident.matrices[name], LOGITS)

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._ops.add_norm(self._whole(hidden), None, self._final_norm())

    @torch.inference_mode()
    def lm_head(self, normed: Tensor) -> Tensor:
        product = self._ops.linear(self._whole(normed), self._head(), LOGITS)
        found: Tensor = self._spec.logits.finish(self._ops, product)
        return found

    def _final_norm(self) -> Norm | None:
        if not self._spec.final_norm:
            return None
        return self._spec.norms.bind(self._resident.of(self._model_blocks[-2]), "norm")

    def _head(self) -> Any:
        return self._resident.of(self._model_blocks[-1]).matrix("tokens")

    @property
    def neurons(self) -> NeuronCounts:
        """Numbers of neurons used so far. The host waits for the GPU."""
        return NeuronCounts(int(self._arena.n_used.item()), self._arena.n_neurons, int(self._arena.n_predicted.item()))

    def draft_rows(self, hidden: Tensor, noise: Sequence[DraftNoise], end: DraftEnd) -> Tensor:
        """Draft after states (m, hidden). The rows stay on the GPU and are valid until the next call."""
        return self._end(end).run(hidden, noise)

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        return self._end(end).logits(hidden)

    def _end(self, end: DraftEnd) -> GpuDraftEnd:
        """Prepare a DraftEnd for the GPU at its first use, and keep its weights there."""
        if end not in self._ends:
            head, norm = self._head() if end.vocabulary is None else None, None if end.is_normed else self._final_norm()
            logits = DraftLogits(self._ops, end, norm, head, self._spec.logits)
            self._ends[end] = GpuDraftEnd(end, logits, self._spec.hidden_size, self._ops, self._recorder)
        return self._ends[end]

    def partial_logits(self, hidden: Tensor, token_ids: Tensor, end: DraftEnd) -> Tensor:
        return self._end(end).partial_logits(hidden, token_ids)

    def _segment(self, blocks: Sequence[Block]) -> GpuSegment:
        names = tuple(block.name for block in blocks)
        if names not in self._segments:
            self._segments[names] = GpuSegment(self._spec, self._resident, blocks, self._resources)
        return self._segments[names]

    def _borrowed_segment(self, block: Block, weights: ModelWeights, cache: GpuCache) -> GpuSegment:
        """Return a segment that runs one block with borrowed weights, without CUDA graphs.

        Copying a block takes longer than launching it, and graphs would need memory. The segment is cached only if the
        weights are used as they are, since repacked ones would stay in memory.
        """
        key = block.name, id(weights)
        found = self._borrowed.get(key)
        if found is not None and found[0] is weights and found[1].cache is cache:
            return found[1]
        segment = GpuSegment(self._spec, weights, [block], replace(self._resources, cache=cache, recorder=None))
        if self._operations.is_capturable:
            self._borrowed[key] = weights, segment
        return segment

    def _whole(self, x: Tensor) -> Tensor:
        """Return a contiguous copy of x on the GPU, since the operations change their inputs."""
        return x.to(self._device, copy=True, memory_format=torch.contiguous_format)


def _token_inputs(spec: ModelSpec, weights: ModelWeights, blocks: Sequence[Block]) -> TokenInputs | None:
    """Return what looks up the layers' table on the host, None if the model has none."""
    if spec.layer_table is None:
        return None
    ops = TorchOps()
    return TokenInputs(spec, ops, DeviceWeights(ops, weights, blocks[:2]))
