"""Compares a sparse model with the dense one on held-out text."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hetero_ee.calibration.stages import HELD_OUT, Chunk, first_numbers
from hetero_ee.config import Progress
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.model_weights import ModelWeights

MEASURING = "Measuring sparsity"


class HeldOut:
    """Held-out chunks of n_tokens together, and the dense model. A chunk's first tokens are not counted."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        chunks: Sequence[Chunk],
        n_tokens: int,
        progress: Progress | None = None,
    ) -> None:
        self._spec, self._weights, self._progress = spec, weights, progress
        self._chunks = [chunks[number] for number in first_numbers(chunks, HELD_OUT, n_tokens)]
        self._dense: list[Tensor] = []

    def divergence(
        self, spec: ModelSpec, weights: ModelWeights, ops: BatchedTorchOps | None = None
    ) -> tuple[float, NeuronCounts]:
        """Return the sparse model's mean KL divergence of the next tokens, in nats, and its neuron counts."""
        self._dense = self._dense or [*self._distributions(self._executor(self._spec, self._weights))]
        executor = self._executor(spec, weights, ops)
        pairs = zip(self._dense, self._distributions(executor), strict=True)
        kl = torch.cat([(theirs.exp() * (theirs - ours)).sum(1) for theirs, ours in pairs])
        return max(0.0, float(kl.mean())), executor.neurons

    def _executor(
        self, spec: ModelSpec, weights: ModelWeights, ops: BatchedTorchOps | None = None
    ) -> ReferenceExecutor:
        return ReferenceExecutor(spec, weights, max(map(len, self._chunks)), ops or BatchedTorchOps())

    def _distributions(self, executor: ReferenceExecutor) -> Iterator[Tensor]:
        """Yield each chunk's log-probabilities of the next tokens, fp64 (m, vocab)."""
        for number, chunk in enumerate(self._chunks):
            if self._progress:
                self._progress(MEASURING, number, len(self._chunks))
            sequence = executor.cache.open_new()
            rows = range(FIRST_SPARSE, len(chunk))
            logits = executor.logits(Batch.of_sequence(sequence, 0, list(chunk)), rows)
            executor.cache.close(sequence)
            yield torch.log_softmax(logits.double(), -1)
