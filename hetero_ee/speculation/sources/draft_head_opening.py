"""Opens a draft head: chooses its code and its device on the machine that runs the model."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.draft_head import EAGLE_1, Dialect, fc_block, layer_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import UNQUANTIZED
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, Machine
from hetero_ee.runtime.drafted import DraftVocabulary
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.speculation.sources.beside import BesideOpener, Running
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import EMBEDDING, DraftHead, DraftHeadLayer
from hetero_ee.speculation.sources.eagle3 import HEAD_ROWS
from hetero_ee.speculation.sources.head_source import HeadName, read_head
from hetero_ee.weights.model_weights import ModelWeights, expanded
from hetero_ee.weights.quantizers import DEFAULT_QUANTIZER, quantize
from hetero_ee.weights.weight import DenseWeight, TileWeight, Weight

if TYPE_CHECKING:
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool


class DraftHeadOpener(BesideOpener[DraftHeadLayer]):
    """Opens the head's layer. See BesideOpener for `target`, `running` and `warn`.

    Args:
        weights: The weights from head_weights.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        target: Executor,
        running: Running | None,
        warn: Callable[[str], None] | None = None,
        dialect: Dialect = EAGLE_1,
    ) -> None:
        super().__init__(target, running, warn, "draft head")
        # On every device, and while the context grows, its keys turn alike.
        self._spec = replace(spec, rope=spec.rope and spec.rope.for_context(target.most_tokens))
        self._weights, self._dialect = weights, dialect

    def _opened(self, machine: Machine, *, on_gpu: bool) -> DraftHeadLayer | None:
        embedding = self._weights.matrices.get(EMBEDDING)
        if not on_gpu or machine.open_beside is None:
            max_tokens = self._target.cache.max_tokens if on_gpu else self._target.most_tokens
            on_cpu = head_on_cpu(self._spec, self._weights, max_tokens, self._target.pool)
            return DraftHeadLayer(on_cpu, self._spec, embedding, machine, on_gpu=on_gpu, dialect=self._dialect)
        if embedding is not None:
            embedded = embedding.rows(torch.tensor([0]))
        else:
            embedded = self._target.run(Batch.of_sequence(0, 0, [0]), None, range(0))
            if self._now() is not self._beside:
                return None
        blocks = [fc_block(self._spec, self._dialect), *layer_blocks(self._spec, self._dialect)]
        executor = machine.open_beside(self._spec, self._weights, blocks, self._target.cache.max_tokens)
        layer = DraftHeadLayer(executor, self._spec, embedding, machine, on_gpu=True, dialect=self._dialect)
        try:
            layer.warm_up(embedded)
        except BaseException:
            executor.close()
            raise
        machine.opened_beside.append(executor)
        return layer


def open_draft_head(
    name: HeadName, target: Executor, running: Running | None = None, warn: Callable[[str], None] | None = None
) -> DraftHeadSource:
    """Return a source of drafts for the target's model from its draft head.

    Args:
        running: Returns the machine that runs the target's plan; None without a plan. Drafting counts as work of that
            machine, and its GPU holds the head if the plan says so.
        warn: See DraftHeadSource and DraftHeadOpener.

    Raises:
        ModelError: if the head does not fit the model.
        CheckpointError: if its files can't be read.
        DeviceMemoryError: if the memory that the plan reserves for it is not available.
    """
    head = read_head(name, target)
    weights, vocabulary = head_parts(head, target)
    if head.dialect.captured:
        target.capture(head.dialect.captured)
    opener = DraftHeadOpener(head.spec, weights, target, running, warn, head.dialect)
    opener.open()
    return DraftHeadSource(opener, target, vocabulary, warn)


def head_parts(head: DraftHead, target: Executor) -> tuple[ModelWeights, DraftVocabulary | None]:
    """Return the head's weights in the target's format, and its vocabulary, None for the model's."""
    weights = head_weights(head, compiled=target.weights.quantizer != UNQUANTIZED)
    rows = weights.matrices.pop(HEAD_ROWS, None)
    return weights, None if head.draft_token_ids is None else draft_vocabulary(target, head.draft_token_ids, rows)


def head_weights(head: DraftHead, quantizer: str = DEFAULT_QUANTIZER, *, compiled: bool) -> ModelWeights:
    """Return the head's weights, quantized by `quantizer` if the model is compiled and they are not quantized yet.

    Compiled weights are tiles for the CPU kernels and the GPU. Their embedding and rows of the lm_head are int8 as in
    the model, and `quantizer` quantizes the rest.
    """
    if not compiled or head.weights.quantizer != UNQUANTIZED:
        return replace(head.weights, matrices=dict(head.weights.matrices))
    tiles: dict[str, Weight] = {
        name: quantize(weight.dequantize(), "int8" if name in (EMBEDDING, HEAD_ROWS) else quantizer)
        for name, weight in head.weights.matrices.items()
    }
    return ModelWeights(tiles, head.weights.vectors, quantizer)


def head_on_cpu(spec: ModelSpec, weights: ModelWeights, max_tokens: int, pool: "ThreadPool | None") -> HostExecutor:
    """Return an executor of these weights on the CPU. `pool` has the threads for tiles; it is None for plain torch."""
    cache = host_cache(spec, max_tokens, BESIDE_KV_TYPE)
    if pool is None:
        return ReferenceExecutor(spec, expanded(weights), max_tokens, cache=cache)
    from hetero_ee.runtime.executors.cpu import CpuExecutor  # the kernels look where to be cached when imported

    return CpuExecutor(spec, weights, max_tokens, pool, cache=cache)


@torch.inference_mode()
def draft_vocabulary(target: Executor, token_ids: Tensor, rows: Weight | None = None) -> DraftVocabulary:
    """Return the vocabulary of a head that scores only these tokens, by its own rows of the lm_head or the model's."""
    if rows is not None:
        return DraftVocabulary(rows, token_ids)
    matrix = target.weights.matrices[target.blocks[-1].tensors["tokens"].name]
    mine = matrix.gathered(token_ids) if isinstance(matrix, TileWeight) else DenseWeight(matrix.rows(token_ids))
    return DraftVocabulary(mine, token_ids)
