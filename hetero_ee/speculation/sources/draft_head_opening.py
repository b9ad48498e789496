"""From a folder to a source of drafts: which code computes a head, and on which device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from hetero_ee.speculation.sources.draft_head_layer import (
    EMBEDDING,
    LM_HEAD,
    DraftHead,
    DraftHeadLayer,
    ExecutorDraftHead,
    PlacedDraftHead,
)
from hetero_ee.weights.model_weights import ModelWeights, expanded
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, quantize
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
    head = read_draft_head(folder, executor.spec)
    lm_head = _lm_head_rows(executor, head.draft_token_ids)
    layer: DraftHeadLayer = draft_head_layer(head, executor.most_tokens, pool, lm_head)
    if machine is not None:
        layer = PlacedDraftHead(layer, head.spec, machine, on_gpu=on_gpu)
    return DraftHeadSource(layer, executor, head.draft_token_ids, warn, on_gpu=on_gpu)


def draft_head_layer(
    head: DraftHead,
    max_tokens: int,
    pool: "ThreadPool | None" = None,
    lm_head: Weight | None = None,
    quantizer: str = DEFAULT_QUANTIZER,
) -> ExecutorDraftHead:
    """pool: see open_draft_head. lm_head: rows of the model's for the draft vocabulary.

    quantizer: of the matrices on the CPU kernels; LM head and embedding are int8 there, as the model's.
    """
    spec = replace(head.spec, final_norm=False, tied_head=False)
    matrices = head.weights.matrices | ({} if lm_head is None else {LM_HEAD: lm_head})
    weights = ModelWeights(matrices, head.weights.vectors)
    if pool is None:
        return ExecutorDraftHead(ReferenceExecutor(spec, expanded(weights), max_tokens))
    from hetero_ee.runtime.executors.cpu import CpuExecutor  # the kernels look where to be cached when imported

    return ExecutorDraftHead(CpuExecutor(spec, _quantized(weights, quantizer), max_tokens, pool))


def _quantized(weights: ModelWeights, quantizer: str) -> ModelWeights:
    """In tiles what is not yet."""
    matrices: dict[str, Weight] = {}
    for name, weight in weights.matrices.items():
        kind = "int8" if name in (EMBEDDING, LM_HEAD) else quantizer
        matrices[name] = weight if isinstance(weight, TileWeight) else quantize(weight.dequantize(), kind)
    return ModelWeights(matrices, weights.vectors, quantizer)


@torch.inference_mode()
def _lm_head_rows(executor: Executor, token_ids: Tensor | None) -> Weight | None:
    """The model's head for these tokens alone, (k, hidden)."""
    if token_ids is None:
        return None
    matrix = executor.weights.matrices[executor.blocks[-1].tensors["tokens"].name]
    return matrix.gathered(token_ids) if isinstance(matrix, TileWeight) else DenseWeight(matrix.rows(token_ids))
