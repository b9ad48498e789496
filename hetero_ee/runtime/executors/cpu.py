"""The executor on the CPU kernels: weights in tiles or rows as stored, int8 activations, one thread pool."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hetero_ee.config import COMPILING, Progress
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.layers.decoder import BoundBlock
from hetero_ee.layers.sparse_ffn import SparseFfn
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.cpu import CpuOps
from hetero_ee.runtime.executors.executor import SplitFfn
from hetero_ee.runtime.executors.host import OpsExecutor
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.sections import section_neurons
from hetero_ee_cpu_ops.heap import keep_freed_memory
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool


class CpuExecutor(OpsExecutor):
    """Runs a model with quantized matrices on the CPU kernels.

    Args:
        threads: a thread pool, or the number of threads to start; close() ends them.
        cache: see HostExecutor.
        reads_ahead: see CpuOps.
    """

    _ops: CpuOps

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        max_tokens: int,
        threads: int | ThreadPool,
        *,
        cache: KvCache | None = None,
        reads_ahead: bool = False,
    ) -> None:
        self._pool = threads if isinstance(threads, ThreadPool) else ThreadPool(threads)
        super().__init__(spec, weights, max_tokens, CpuOps(self._pool, reads_ahead=reads_ahead), cache)
        keep_freed_memory()

    def prepare(self, progress: Progress | None = None, stage: str = COMPILING, n_tokens: Iterable[int] = (1,)) -> None:
        """Compile the kernels that the first token needs, or load them from the disk.

        Args:
            n_tokens: batch sizes for which a pass is run, because attention kernels depend on them.
        """
        tiles = (matrix.tiles for matrix in self._device_weights.matrices.values())
        kinds = sorted({each.kind for each in tiles if each is not None})
        for n_done, kind in enumerate(kinds):
            if progress:
                progress(stage, n_done, len(kinds) + 1)
            self._ops.compile(kind)
        if progress:
            progress(stage, len(kinds), len(kinds) + 1)
        for m in n_tokens:  # attention has kernels of its own for some numbers of tokens
            sequence = self.cache.open_new()
            self.hidden(Batch.of_sequence(sequence, 0, [0] * m))
            self.cache.close(sequence)
        if progress:
            progress(stage, len(kinds) + 1, len(kinds) + 1)

    def close(self) -> None:
        self._pool.close()

    @property
    def pool(self) -> ThreadPool:
        return self._pool

    def _neuron_split(self, block: Block, n_first: int) -> SplitFfn:
        return CpuSplit(self, self._of(block), n_first)


class CpuSplit(SplitFfn):
    """The steps of a split sparse FFN on the CPU, which may also stand in for the GPU of an emulated machine."""

    def __init__(self, executor: CpuExecutor, block: BoundBlock, n_first: int) -> None:
        self._ops, self._rows = executor._ops, executor._rows
        self._block, self._n_first, self._width = block, n_first, executor.spec.hidden_size
        assert isinstance(block.mixer, SparseFfn), "not a sparse FFN"
        self._ffn, section = block.mixer, n_first // section_neurons(executor.spec.ffn_size)
        self._first = self._ffn.part(self._ops, slice(0, n_first), section)
        self._rest = self._ffn.part(self._ops, slice(n_first, None), section)

    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        x = self._ops.add_norm(self._ops.array(hidden), None, self._block.norm)
        scores = self._ffn.scores(self._ops, x)
        return torch.from_numpy(x if scores is None else np.hstack([x, scores[:, self._n_first :]]))

    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        normed = self._ops.view(x[:, : self._width])
        scores = self._ffn.scores(self._ops, normed)
        scores = None if scores is None else np.ascontiguousarray(scores[:, : self._n_first])
        return torch.from_numpy(self._first.first_sums(self._ops, normed, scores, self._rows(batch)))

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        normed = self._ops.view(x[:, : self._width])
        scores = self._ops.view(x[:, self._width :]) if x.shape[1] > self._width else None
        return torch.from_numpy(self._rest.rest(self._ops, normed, scores, self._rows(batch)))

    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        normed = self._ops.view(x[:, : self._width])
        delta = self._first.end(self._ops, normed, sums.numpy(), rest.numpy())
        return torch.from_numpy(self._block.add(self._ops, self._ops.array(hidden), delta))
