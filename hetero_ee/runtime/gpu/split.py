"""The GPU's part of a sparse FFN with the first neurons, in three steps, while the CPU computes the other neurons."""

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import GpuCache
from hetero_ee.layers.ops import DELTA, INNER, NORMED
from hetero_ee.layers.sparse_ffn import SparseFfn
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.arena import Arena
from hetero_ee.ops.device_weights import DeviceWeights
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.runtime.executors.executor import SplitFfn
from hetero_ee.runtime.gpu.segment import GpuSegment, Recorder, Replays, entered
from hetero_ee.weights.sections import section_neurons


class GpuSplit(GpuSegment, SplitFfn):
    """The steps of a split FFN on the GPU.

    Between begin() and end() nothing else may use the arena's buffers.

    Args:
        weights: weights of the first neurons, but of all neurons for a predictor, see `with_first_neurons`.
        n_first: neurons on the GPU, in whole sections.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        block: Block,
        n_first: int,
        cache: GpuCache,
        operations: GpuOperations,
        recorder: Recorder | None,
        arena: Arena,
    ) -> None:
        super().__init__(spec, weights, [block], cache, operations, recorder, arena)
        (self._block,), self._n_first = self._blocks, n_first
        assert isinstance(self._block.mixer, SparseFfn), "not a sparse FFN"
        self._ffn = self._block.mixer
        self._part = self._ffn.part(self._ops, slice(0, n_first), n_first // section_neurons(spec.ffn_size))
        self._steps = [Replays(recorder) for _ in range(3)]

    @torch.inference_mode()
    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        self._arena.n_neurons += int(batch.may_skip().sum()) * self._n_first
        with entered(self._device):
            ((_, m),) = self._placed(hidden, batch)
            self._steps[0].run(m, self._enter)
            normed, scores = self._normed(m), self._scores(m)
            return normed if scores is None else torch.cat([normed, scores[:, self._n_first :]], 1)

    @torch.inference_mode()
    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        with entered(self._device):
            self._steps[1].run(len(x), self._add_up)
        return self._ops.section_sums(len(x), self._part.neurons)

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError("the other neurons are the CPU's")

    @torch.inference_mode()
    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        m = len(rest)
        with entered(self._device):
            self._arena.rows(DELTA, m, self.spec.hidden_size).copy_(rest)
            self._steps[2].run(m, self._fold)
            return self._hidden(m).clone()

    def _normed(self, m: int) -> Tensor:
        return self._arena.rows(NORMED, m, self.spec.hidden_size)

    def _scores(self, m: int) -> Tensor | None:
        """Return the buffer of a predictor's scores (m, neurons), None without a predictor."""
        return self._arena.rows(INNER, m, self.spec.ffn_size) if self.spec.predictor_rank else None

    def _enter(self, m: int) -> None:
        """Apply the norm and compute the predictor's scores."""
        self._ffn.scores(self._ops, self._ops.add_norm(self._hidden(m), None, self._block.norm))

    def _add_up(self, m: int) -> None:
        self._part.first_sums(self._ops, self._normed(m), self._scores(m), self._arena.tokens(m))

    def _fold(self, m: int) -> None:
        """Add the sums of both devices to the hidden states. The CPU's sum is in the buffer DELTA."""
        sums = self._ops.section_sums(m, self._part.neurons)
        rest = self._arena.rows(DELTA, m, self.spec.hidden_size)
        delta = self._part.end(self._ops, self._normed(m), sums, rest)
        self._ops.add(self._hidden(m), self._block.finish(self._ops, delta))
