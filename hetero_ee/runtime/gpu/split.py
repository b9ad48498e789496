"""A sparse FFN whose first neurons are on the GPU: in three steps, so that the CPU adds up the others meanwhile."""

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.ops.gpu_weights import GpuWeights
from hetero_ee.planning.hot import BLOCK, MAX_SECTIONS, section_neurons
from hetero_ee.runtime.executors.executor import SplitFfn
from hetero_ee.runtime.gpu.buffers import SegmentRoom
from hetero_ee.runtime.gpu.segment import GpuSegment, Recorder, Replays, entered
from hetero_ee.weights.rows import UNIT_COLUMNS


class GpuSplit(GpuSegment, SplitFfn):
    """n_first: neurons, whole sections. weights: of these neurons alone, but for the predictor, see first_neurons.

    Between begin() and end() the room's buffers are its own.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: GpuWeights,
        block: Block,
        n_first: int,
        cache: GpuKvCache,
        operations: GpuOperations,
        recorder: Recorder | None,
        room: SegmentRoom,
    ) -> None:
        super().__init__(spec, weights, [block], cache, operations, recorder, room)
        self._block, self._n_first = block, n_first
        self._section = section_neurons(spec.ffn_size)
        self._steps = [Replays(recorder) for _ in range(3)]

    @torch.inference_mode()
    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        self._room.n_neurons += int(batch.may_skip().sum()) * self._n_first
        with entered(self._device):
            ((_, m),) = self._placed(hidden, batch)
            self._steps[0].run(m, self._enter)
            b = self._room.buffers.first(m)
            return torch.cat([b.normed, b.inner[:, self._n_first :]], 1) if self.spec.predictor_rank else b.normed

    @torch.inference_mode()
    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        with entered(self._device):
            self._steps[1].run(len(x), self._add_up)
        return self._sums(len(x))

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError("the other neurons are the CPU's")

    @torch.inference_mode()
    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        m = len(rest)
        with entered(self._device):
            b = self._room.buffers.first(m)
            b.delta.copy_(rest)
            self._steps[2].run(m, self._fold)
            return b.x.clone()

    def _enter(self, m: int) -> None:
        """buffers.normed, and a predictor's scores in buffers.inner."""
        b = self._room.buffers.first(m)
        self._normed(self._block, b, None)
        if self.spec.predictor_rank:
            self._score(self._block, b)

    def _add_up(self, m: int) -> None:
        spec, ops, weights, block = self.spec, self._ops, self._weights, self._block
        b = self._room.buffers.first(m)
        first, active = (b.normed.new_empty(m, self._n_first) for _ in range(2))
        self._multiply_first(block, b, first)
        ops.activate(first, spec.activation, active, gated=False, threshold=spec.activation_threshold)
        up = weights.neurons(block, "up") if spec.gated else None
        skips = {"least": weights.least(block), "may_skip": b.may_skip, "n_used": self._room.n_used}
        down = weights.neurons(block, "down")
        ops.first_sections(b.normed, active, up, down, self._section // BLOCK, self._sums(m), **skips)

    def _fold(self, m: int) -> None:
        """buffers.x after the FFN, of the other neurons' sum in buffers.delta."""
        b, down = self._room.buffers.first(m), self._weights.neurons(self._block, "down")
        self._ops.fold_sections(self._sums(m), down, b.delta, b.delta)
        self._add_down_bias(self._block, b)
        self._finish(self._block, b)
        self._ops.add(b.x, b.delta)

    def _sums(self, m: int) -> Tensor:
        """Of m rows, where the next pass of as many has them too."""
        n_sections = self._n_first // self._section
        width = UNIT_COLUMNS * self._weights.neurons(self._block, "down").n_units
        return self._room.section_sums(MAX_SECTIONS * width)[: n_sections * m * width].view(n_sections, m, width)
