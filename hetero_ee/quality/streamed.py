"""Run texts through a model block by block, so that memory holds the fp32 weights of one block instead of all."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.kv.devices import host_cache
from hetero_ee.layers.tensors import TensorSpec
from hetero_ee.models.blocks import Block, BlockKind, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import ModelWeights, as_stored, is_quantized
from hetero_ee.weights.quantizers import Workers
from hetero_ee.weights.store.reader import is_store, open_store
from hetero_ee.weights.weight import DenseWeight, Weight

GROUP_TOKENS = 1024  # tokens in one product, whatever the number of threads, on which results must not depend

Read = Callable[[TensorSpec], Tensor]  # returns a tensor as fp32
Ids = Sequence[int]
OpsOf = Callable[[int], BatchedTorchOps]


def opened(folder: Path) -> tuple[ModelSpec, Read]:
    """Open a checkpoint or a store. Return its spec and a function that reads and dequantizes one tensor."""
    spec = read_spec(folder)
    if not is_store(folder):
        checkpoint = open_checkpoint(folder, spec)
        return spec, lambda tensor: checkpoint.tensor(tensor.name)
    weights = open_store(folder, spec)

    def read(tensor: TensorSpec) -> Tensor:
        matrix = weights.matrices.get(tensor.name)
        return weights.vectors[tensor.name] if matrix is None else matrix.dequantize()

    return as_stored(spec, weights), read


class StreamedModel:
    """A model that texts pass through block by block.

    Args:
        read: see `opened`.
        texts: token ids of texts, each of which begins with an empty context.
        workers: map function of the threads that share each block's work.
    """

    def __init__(self, spec: ModelSpec, read: Read, texts: Sequence[Ids], workers: Workers) -> None:
        self.spec, self._read, self._workers = spec, read, workers
        self._blocks = decoder_blocks(spec)
        self._batches = [_joined(group) for group in _groups(texts)]
        self._max_tokens = max(map(len, texts))
        states = [block.state for block in self._blocks]
        self._sources = {state.source for state in states if state is not None and state.source is not None}
        self._caches: dict[int, list[KvCache]] = {}  # of these layers, whose keys and values later layers read
        self._inputs = self.weights(self._of_kinds(BlockKind.EMBEDDING, BlockKind.TABLE))
        self.states = [self._executor(self._inputs).embed(batch) for batch in self._batches]
        if spec.layer_table is None:  # else layers read tokens
            self._inputs = ModelWeights({}, {})

    def fork(self) -> "StreamedModel":
        """Return a model with the same states, which texts then pass independently of this one."""
        made = copy(self)
        made._caches = dict(self._caches)
        return made

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self._batches))

    def layer_blocks(self) -> list[Block]:
        """Return the blocks that hidden states pass between the embedding and the final norm."""
        return [block for block in self._blocks if block.layer is not None]

    def weights(self, blocks: Sequence[Block]) -> ModelWeights:
        """Read the blocks' weights as fp32."""
        matrices, vectors = dict[str, Weight](), dict[str, Tensor]()
        for tensor in (tensor for block in blocks for tensor in block.tensors.values()):
            if is_quantized(tensor.role):
                matrices[tensor.name] = DenseWeight(self._read(tensor))
            else:
                vectors[tensor.name] = self._read(tensor)
        return ModelWeights(matrices, vectors)

    def pass_block(self, block: Block, weights: ModelWeights, ops: OpsOf = lambda _: BatchedTorchOps()) -> None:
        """Replace `states`, (m, hidden) for each group of texts, by those after the block.

        Args:
            ops: returns the operations for the group with this number. Groups are passed by several threads.
        """
        weights = ModelWeights(weights.matrices | self._inputs.matrices, weights.vectors | self._inputs.vectors)

        def passed(group: int) -> Tensor:
            batch, cache = self._batches[group], self._cache(block, group)
            executor = ReferenceExecutor(self.spec, weights, self._max_tokens, ops(group), cache=cache)
            if block.state is not None and block.state.source is None:
                for sequence in batch.by_sequence():
                    cache.open(sequence)
                cache.admit(batch, range(block.layer or 0, (block.layer or 0) + 1))
            return executor.forward(self.states[group], batch, [block])

        self.states = list(self._workers(passed, range(len(self._batches))))

    def logits(self, n_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits (m, vocab) and the ids (m,) of the tokens that they predict, of up to n_tokens of one text.

        The states must have passed all blocks of layers.
        """
        executor = self._executor(self.weights(self._of_kinds(BlockKind.FINAL_NORM, BlockKind.HEAD)))
        for batch, states in zip(self._batches, self.states, strict=True):
            for rows in batch.by_sequence().values():
                for first in range(0, len(rows) - 1, n_tokens):
                    some = rows[first : min(first + n_tokens, len(rows) - 1)]
                    targets = torch.tensor([batch.token_ids[row + 1] for row in some])
                    yield executor.to_logits(states[some]), targets

    def _of_kinds(self, *kinds: BlockKind) -> list[Block]:
        return [block for block in self._blocks if block.kind in kinds]

    def _executor(self, weights: ModelWeights) -> ReferenceExecutor:
        cache = host_cache(self.spec, self._max_tokens, "fp32", [])
        return ReferenceExecutor(self.spec, weights, self._max_tokens, BatchedTorchOps(), cache=cache)

    def _cache(self, block: Block, group: int) -> KvCache:
        """Return an empty cache of the block's layer, or the filled one whose keys and values the block reads."""
        source = None if block.state is None else block.state.source
        if source is not None:
            return self._caches[source][group]
        made = host_cache(self.spec, self._max_tokens, "fp32", [] if block.state is None else [block.layer or 0])
        if block.state is not None and block.layer is not None and block.layer in self._sources:
            self._caches.setdefault(block.layer, [made] * len(self._batches))[group] = made
        return made


def _groups(texts: Sequence[Ids]) -> list[list[Ids]]:
    """Split texts into groups of at most GROUP_TOKENS, or of one longer text."""
    groups, n_tokens = list[list[Ids]](), GROUP_TOKENS
    for text in texts:
        n_tokens += len(text)
        if n_tokens > GROUP_TOKENS:
            groups.append([])
            n_tokens = len(text)
        groups[-1].append(text)
    return groups


def _joined(texts: Sequence[Ids]) -> Batch:
    return Batch.joined([Batch.of_sequence(number, 0, list(ids), is_prompt=True) for number, ids in enumerate(texts)])
