"""Runs the blocks of a model in the CPU's memory, by plain torch or by the CPU kernels."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.layers import decoder
from hetero_ee.layers.decoder import BoundBlock
from hetero_ee.layers.moe import Moe
from hetero_ee.layers.ops import LOGITS, Array, Experts, LookUp, Matrix, Norm, Ops
from hetero_ee.models.blocks import Block, bind
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.device_weights import DeviceWeights
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.ops.token_inputs import TokenInputs
from hetero_ee.runtime.draft_logits import DraftLogits
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import HostExecutor, SplitFfn
from hetero_ee.weights.model_weights import ModelWeights


class HostOps(Ops, Protocol):
    """Operations on arrays in the CPU's memory. Tensors are converted to arrays without copies."""

    def rows(self, batch: Batch, counts: NeuronCounts, look_up: LookUp | None = None) -> Any: ...

    def array(self, x: Tensor) -> Array: ...

    def view(self, x: Tensor) -> Array: ...

    def tensor(self, x: Array) -> Tensor: ...


class OpsExecutor(HostExecutor):
    """Runs a model by the operations `ops`. Blocks are bound to their weights when they first run."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, max_tokens: int, ops: HostOps, cache: KvCache | None = None
    ) -> None:
        super().__init__(spec, weights, max_tokens, cache)
        self._ops = ops
        self._device_weights = DeviceWeights(ops, weights)
        self._bound: dict[int, tuple[Block, BoundBlock]] = {}  # by identity: blocks of one name may differ
        self._borrowed: dict[tuple[str, int], tuple[ModelWeights, BoundBlock]] = {}
        self._splits: dict[tuple[str, int], SplitFfn] = {}
        self._ends: dict[DraftEnd, DraftLogits] = {}
        self._inputs = TokenInputs(spec, ops, self._device_weights)

    def embed(self, batch: Batch) -> Tensor:
        parameters = self._device_weights.of(self.blocks[0])
        return self._ops.tensor(self.spec.embedding.forward(self._ops, parameters, batch))

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self._ops.tensor(self._ops.linear(self._ops.view(x), self._device_weights.matrices[name], LOGITS))

    def normed(self, x: Tensor, name: str) -> Tensor:
        norm = Norm("rms", self._device_weights.vectors[name], None, self.spec.norm_eps)
        return self._ops.tensor(self._ops.add_norm(self._ops.view(x), None, norm))

    def mix(self, x: Tensor, batch: Batch, block: Block) -> Tensor:
        mixer = self._of(block).mixer
        return self._ops.tensor(mixer.forward(self._ops, self._ops.view(x), self._rows(batch)))

    def forward(self, hidden: Tensor, batch: Batch, blocks: Sequence[Block]) -> Tensor:
        return self._through([self._of(block) for block in blocks], hidden, batch)

    def split(self, block: Block, n_first: int) -> SplitFfn:
        key = block.name, n_first
        if key not in self._splits:
            bound = self._of(block)
            is_moe = isinstance(bound.mixer, Moe)
            self._splits[key] = (
                HostMoeSplit(self._ops, bound, n_first) if is_moe else self._neuron_split(block, n_first)
            )
        return self._splits[key]

    def _neuron_split(self, block: Block, n_first: int) -> SplitFfn:
        """Return this device's part of a sparse FFN."""
        return super().split(block, n_first)

    def forward_with(self, hidden: Tensor, batch: Batch, block: Block, weights: ModelWeights) -> Tensor:
        key = block.name, id(weights)
        found = self._borrowed.get(key)
        if found is None or found[0] is not weights:
            mine = self.weights
            both = ModelWeights(mine.matrices | weights.matrices, mine.vectors | weights.vectors)
            parameters = DeviceWeights(self._ops, both, [block]).of(block)
            found = weights, bind(self._ops, self.spec, block, parameters, self.cache)
            self._borrowed[key] = found
        return self._through([found[1]], hidden, batch)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._ops.tensor(self._ops.add_norm(self._ops.view(hidden), None, self._final_norm()))

    def lm_head(self, normed: Tensor) -> Tensor:
        product = self._ops.linear(self._ops.view(normed), self._head(), LOGITS)
        return self._ops.tensor(self.spec.logits.finish(self._ops, product))

    def draft_logits(self, hidden: Tensor, end: DraftEnd) -> Tensor:
        return self._ops.tensor(self._end(end).all(self._ops, self._ops.view(hidden)))

    def partial_logits(self, hidden: Tensor, token_ids: Tensor, end: DraftEnd) -> Tensor:
        return self._ops.tensor(self._end(end).some(self._ops, self._ops.view(hidden), token_ids))

    def _final_norm(self) -> Norm | None:
        if not self.spec.final_norm:
            return None
        return self.spec.norms.bind(self._device_weights.of(self.blocks[-2]), "norm")

    def _head(self) -> Matrix:
        return self._device_weights.of(self.blocks[-1]).matrix("tokens")

    def _end(self, end: DraftEnd) -> DraftLogits:
        if end not in self._ends:
            head, norm = self._head() if end.vocabulary is None else None, None if end.is_normed else self._final_norm()
            self._ends[end] = DraftLogits(self._ops, end, norm, head, self.spec.logits)
        return self._ends[end]

    def _of(self, block: Block) -> BoundBlock:
        """Return the block bound to the executor's own weights and cache."""
        found = self._bound.get(id(block))
        if found is None:
            parameters = self._device_weights.of(block)
            found = self._bound[id(block)] = block, bind(self._ops, self.spec, block, parameters, self.cache)
        return found[1]

    def _through(self, bound: Sequence[BoundBlock], hidden: Tensor, batch: Batch) -> Tensor:
        return self._ops.tensor(decoder.forward(self._ops, bound, self._ops.array(hidden), self._rows(batch)))

    def _rows(self, batch: Batch) -> Any:
        return self._ops.rows(batch, self._neurons, self._inputs)


class HostMoeSplit(SplitFfn):
    """The steps of a split mixture of experts on the CPU, which may also stand in for the GPU of an emulated machine.

    A token's routes follow its normed state in x.
    """

    def __init__(self, ops: HostOps, block: BoundBlock, n_first: int) -> None:
        assert isinstance(block.mixer, Moe), "not a mixture of experts"
        self._ops, self._block, self._moe = ops, block, block.mixer
        self._first, self._rest = (block.mixer.part(ops, each) for each in (slice(0, n_first), slice(n_first, None)))

    def begin(self, hidden: Tensor, batch: Batch) -> Tensor:
        x = self._ops.add_norm(self._ops.array(hidden), None, self._block.norm)
        return self._ops.tensor(self._ops.concatenate([x, self._ops.route(x, self._moe.router)]))

    def first_sums(self, x: Tensor, batch: Batch) -> Tensor:
        return x  # end() computes the first experts, as nothing else could be computed meanwhile

    def rest(self, x: Tensor, batch: Batch) -> Tensor:
        return self._ops.tensor(self._sums(x, self._rest, None))

    def end(self, hidden: Tensor, x: Tensor, sums: Tensor, rest: Tensor) -> Tensor:
        summed = self._sums(x, self._first, self._ops.view(rest))
        delta = self._moe.end(self._ops, summed, self._moe.shared(self._ops, self._normed(x)))
        return self._ops.tensor(self._block.add(self._ops, self._ops.array(hidden), delta))

    def _sums(self, x: Tensor, experts: Experts, sums: Array | None) -> Array:
        routes = self._ops.view(x[:, experts.n_down_rows :])
        return self._ops.expert_sums(self._moe.inputs(self._ops, self._normed(x)), routes, experts, sums)

    def _normed(self, x: Tensor) -> Array:
        return self._ops.view(x[:, : self._first.n_down_rows])
