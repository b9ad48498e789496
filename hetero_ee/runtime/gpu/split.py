"""The GPU's part of a split FFN, in three steps, while the CPU computes the other neurons or experts."""

from typing import Any

import torch
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.layers.moe import Moe
from hetero_ee.layers.ops import DELTA, INNER, NORMED, OUTPUTS, ROUTES, SHARED
from hetero_ee.layers.sparse_ffn import SparseFfn
from hetero_ee.models.blocks import Block
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.device_weights import DeviceWeights
from hetero_ee.runtime.executors.executor import SplitFfn
from hetero_ee.runtime.gpu.segment import GpuResources, GpuSegment, Replays, entered
from hetero_ee.weights.sections import section_neurons


class GpuSplit(GpuSegment, SplitFfn):
    """The steps of a split FFN on the GPU.

    Between begin() and end() nothing else may use the arena's buffers.

    Args:
        weights: weights of the first neurons or experts, but of all for a predictor or router, see `with_first_units`.
        n_first: neurons, in whole sections, or experts on the GPU.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        block: Block,
        n_first: int,
        resources: GpuResources,
    ) -> None:
        super().__init__(spec, weights, [block], resources)
        (self._block,), self._n_first = self._blocks, n_first
        self._steps = [Replays(resources.recorder) for _ in range(3)]

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError("the other neurons or experts are the CPU's")

    @torch.inference_mode()
    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        m = len(rest)
        with entered(self._device):
            self._rest(m).copy_(rest)
            self._steps[2].run(m, self._fold)
            return self._hidden(m).clone()

    def _fold(self, m: int) -> None:
        """Add the sums of both devices to the hidden states. The CPU's sum is in the buffer _rest()."""
        raise NotImplementedError

    def _normed(self, m: int) -> Tensor:
        return self._arena.rows(NORMED, m, self.spec.hidden_size)

    def _rest(self, m: int) -> Tensor:
        return self._arena.rows(DELTA, m, self.spec.hidden_size)


class GpuNeuronSplit(GpuSplit):
    """The steps of a sparse FFN."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert isinstance(self._block.mixer, SparseFfn), "not a sparse FFN"
        self._ffn, section = self._block.mixer, section_neurons(self.spec.ffn_size)
        self._part = self._ffn.part(self._ops, slice(0, self._n_first), self._n_first // section)

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

    def _scores(self, m: int) -> Tensor | None:
        """Return the buffer of a predictor's scores (m, neurons), None without a predictor."""
        return self._arena.rows(INNER, m, self.spec.ffn_size) if self.spec.predictor_rank else None

    def _enter(self, m: int) -> None:
        """Apply the norm and compute the predictor's scores."""
        self._ffn.scores(self._ops, self._ops.add_norm(self._hidden(m), None, self._block.norm))

    def _add_up(self, m: int) -> None:
        self._part.first_sums(self._ops, self._normed(m), self._scores(m), self._arena.tokens(m))

    def _fold(self, m: int) -> None:
        sums = self._ops.section_sums(m, self._part.neurons)
        delta = self._part.end(self._ops, self._normed(m), sums, self._rest(m))
        self._block.add(self._ops, self._hidden(m), delta)


class GpuMoeSplit(GpuSplit):
    """The steps of a mixture of experts. A token's routes follow its normed state in x."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert isinstance(self._block.mixer, Moe), "not a mixture of experts"
        self._moe = self._block.mixer
        self._part = self._moe.part(self._ops, slice(0, self._n_first))

    @torch.inference_mode()
    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        with entered(self._device):
            ((_, m),) = self._placed(hidden, batch)
            self._steps[0].run(m, self._enter)
            return torch.cat([self._normed(m), self._routes(m)], 1)

    @torch.inference_mode()
    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        with entered(self._device):
            self._steps[1].run(len(x), self._compute_first)
        return self._rest(len(x))  # the results stay in the arena

    def _routes(self, m: int) -> Tensor:
        return self._arena.rows(ROUTES, m, 2 * self._moe.router.spec.n_active)

    def _outputs(self, m: int) -> Tensor:
        return self._arena.rows(OUTPUTS, m * self._moe.router.spec.n_active, self.spec.hidden_size)

    def _enter(self, m: int) -> None:
        self._ops.route(self._ops.add_norm(self._hidden(m), None, self._block.norm), self._moe.router)

    def _compute_first(self, m: int) -> None:
        self._ops.expert_outputs(self._moe.inputs(self._ops, self._normed(m)), self._routes(m), self._part)
        self._moe.shared(self._ops, self._normed(m))

    def _fold(self, m: int) -> None:
        shared = self._arena.rows(SHARED, m, self.spec.hidden_size) if self._moe.has_shared else None
        summed = self._ops.add_experts(self._outputs(m), self._routes(m), self._part, self._rest(m))
        delta = self._moe.end(self._ops, summed, shared)
        self._block.add(self._ops, self._hidden(m), delta)
