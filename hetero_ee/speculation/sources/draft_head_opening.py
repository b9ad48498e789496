"""From a folder to a source of drafts: which code computes a head, on which device of the machine that runs the model
now."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.cpu import host_machine
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, Machine
from hetero_ee.runtime.drafted import DraftVocabulary
from hetero_ee.runtime.executors.executor import BlockExecutor, Executor, HostExecutor
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kv.cpu import CpuKvCache
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from hetero_ee.speculation.sources.draft_head_layer import (
    EMBEDDING,
    DraftHead,
    DraftHeadLayer,
    fc_block,
    layer_blocks,
)
from hetero_ee.weights.model_weights import UNQUANTIZED, ModelWeights, expanded
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, quantize
from hetero_ee.weights.weight import DenseWeight, TileWeight, Weight

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.thread_pool import ThreadPool

Running = Callable[[], PlannedExecutor]


class DraftHeadOpener:
    """The head's layer on the machine that runs the model now: opened again after another plan was.

    weights: see head_weights.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, target: Executor, running: Running | None) -> None:
        self._spec, self._weights, self._target = spec, weights, target
        self._running, self._host = running, host_machine()
        self._layer: DraftHeadLayer | None = None
        self._machine: Machine | None = None  # that it was opened on

    def __call__(self) -> DraftHeadLayer:
        """Raises DeviceMemoryError where the plan's room for it turns out not to be there."""
        running = self._running() if self._running is not None else None
        machine = self._host if running is None else running.machine
        if self._layer is None or machine is not self._machine:
            on_gpu = running is not None and running.plan.draft_device == GPU
            self._layer, self._machine = self._opened(machine, on_gpu=on_gpu), machine
        return self._layer

    def _opened(self, machine: Machine, *, on_gpu: bool) -> DraftHeadLayer:
        if not on_gpu or machine.open_beside is None:
            max_tokens = self._target.cache.max_tokens if on_gpu else self._target.most_tokens
            executor: BlockExecutor = head_on_cpu(self._spec, self._weights, max_tokens, self._target.pool)
        else:
            blocks, max_tokens = [fc_block(self._spec), *layer_blocks(self._spec)], self._target.cache.max_tokens
            executor = machine.open_beside(self._spec, self._weights, blocks, max_tokens)
            machine.opened_beside.append(executor)
        embedding = self._weights.matrices.get(EMBEDDING)
        layer = DraftHeadLayer(executor, self._spec, embedding, machine, on_gpu=on_gpu)
        if on_gpu and machine.open_beside is not None:
            embedded = layer.embed([0])
            if embedded is None:
                embedded = self._target.run(Batch.of_sequence(0, 0, [0]), None, range(0))
            layer.warm_up(embedded)
        return layer


def open_draft_head(
    folder: Path, target: Executor, running: Running | None = None, warn: Callable[[str], None] | None = None
) -> DraftHeadSource:
    """Drafts for the target's model from the head in `folder`.

    running: what runs the target's plan now, where it runs one: its machine is told what drafting takes, on its GPU
    where the plan has room for the head there. warn: see DraftHeadSource. Raises ModelError, CheckpointError.
    """
    head = read_draft_head(folder, target.spec)
    weights = head_weights(head, compiled=target.weights.quantizer != UNQUANTIZED)
    vocabulary = None if head.draft_token_ids is None else draft_vocabulary(target, head.draft_token_ids)
    return DraftHeadSource(DraftHeadOpener(head.spec, weights, target, running), target, vocabulary, warn)


def head_weights(head: DraftHead, quantizer: str = DEFAULT_QUANTIZER, *, compiled: bool) -> ModelWeights:
    """compiled: in tiles, for the CPU kernels and the GPU; the embedding is int8 there, as the model's, and the rest is
    by `quantizer`."""
    if not compiled:
        return head.weights
    tiles: dict[str, Weight] = {
        name: quantize(weight.dequantize(), "int8" if name == EMBEDDING else quantizer)
        for name, weight in head.weights.matrices.items()
    }
    return ModelWeights(tiles, head.weights.vectors, quantizer)


def head_on_cpu(spec: ModelSpec, weights: ModelWeights, max_tokens: int, pool: "ThreadPool | None") -> HostExecutor:
    """What computes a head of these weights there; pool: threads for weights in tiles, None for plain torch."""
    cache = CpuKvCache(1, spec.n_kv_heads, spec.head_dim, max_tokens, kind=BESIDE_KV_TYPE)
    if pool is None:
        return ReferenceExecutor(spec, expanded(weights), max_tokens, cache=cache)
    from hetero_ee.runtime.executors.cpu import CpuExecutor  # the kernels look where to be cached when imported

    return CpuExecutor(spec, weights, max_tokens, pool, cache=cache)


@torch.inference_mode()
def draft_vocabulary(target: Executor, token_ids: Tensor) -> DraftVocabulary:
    """The model's head for these tokens alone."""
    matrix = target.weights.matrices[target.blocks[-1].tensors["tokens"].name]
    rows = matrix.gathered(token_ids) if isinstance(matrix, TileWeight) else DenseWeight(matrix.rows(token_ids))
    return DraftVocabulary(rows, token_ids)
