"""From a folder to a source of drafts: which code computes a head, and on which device."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer, DraftHeadWeights, TorchDraftHeadLayer
from hetero_ee.speculation.sources.draft_head_placement import PlacedDraftHeadLayer
from hetero_ee.weights.weight import DenseWeight, TileWeight, Weight

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.thread_pool import ThreadPool


def open_draft_head(
    folder: Path,
    executor: Executor,
    pool: "ThreadPool | None" = None,
    *,
    machine: Callable[[], Machine] | None = None,
    on_gpu: bool = False,
    warn: Callable[[str], None] | None = None,
) -> DraftHeadSource:
    """Drafts for the executor's model from the head in `folder`.

    pool: threads for the CPU kernels, the caller's to close; None computes in plain torch. machine: told what drafting
    takes, on its CPU or, with on_gpu, its GPU. warn: see DraftHeadSource. Raises ModelError, CheckpointError.
    """
    weights = read_draft_head(folder, executor.spec)
    layer = _layer(weights, executor, pool)
    if machine is not None:
        layer = PlacedDraftHeadLayer(layer, weights.spec, machine, on_gpu=on_gpu)
    return DraftHeadSource(layer, executor, weights.draft_token_ids, warn, on_gpu=on_gpu)


def _layer(weights: DraftHeadWeights, executor: Executor, pool: "ThreadPool | None") -> DraftHeadLayer:
    head, max_tokens = _head_rows(executor, weights.draft_token_ids), executor.cache.max_tokens
    if pool is None:
        return TorchDraftHeadLayer(weights, max_tokens, None if head is None else head.dequantize())
    from hetero_ee.speculation.sources.draft_head_cpu import (
        CpuDraftHeadLayer,  # the kernels look where to be cached when imported
    )

    return CpuDraftHeadLayer(weights, max_tokens, pool, head)


@torch.inference_mode()
def _head_rows(executor: Executor, token_ids: Tensor | None) -> Weight | None:
    """The model's head for these tokens alone, (k, hidden)."""
    if token_ids is None:
        return None
    matrix = executor.weights.matrices[executor.blocks[-1].tensors["tokens"].name]
    return matrix.gathered(token_ids) if isinstance(matrix, TileWeight) else DenseWeight(matrix.rows(token_ids))
