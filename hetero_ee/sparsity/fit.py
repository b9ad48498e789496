"""Fits a model's sparsity curves on text: two passes in plain torch, then measurements against the dense model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.stages import HELD_OUT, TRAIN, Chunk, first_numbers
from hetero_ee.calibration.traces import FIRST_COUNTED
from hetero_ee.config import Progress
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.sparsity.curves import Measurement, SparsityCurves, largest_within
from hetero_ee.sparsity.dealing import SHARES
from hetero_ee.sparsity.recorder import ErrorRecorder, FfnRecorder, ScoreRecorder, Scores
from hetero_ee.sparsity.thresholds import Thresholds, down_norms, neuron_blocks
from hetero_ee.weights.model_weights import ModelWeights

PART_TOKENS = 1024  # to fit on, and to measure on
FITTING, MEASURING = "Fitting sparsity", "Measuring sparsity"


class SparsityFit:
    """A model in neuron-major layout, and chunks of text: those of TRAIN to fit on, of HELD_OUT to measure on.

    scores: of neurons; None for those that executors go by. Each chunk's first token is left out of everything.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        chunks: Sequence[Chunk],
        scores: Scores | None = None,
        n_tokens: int = PART_TOKENS,
        progress: Progress | None = None,
    ) -> None:
        self._spec, self._weights, self._progress = spec, weights, progress
        self._scores = scores or weighted_scores(spec, weights)
        self._fitted = [chunks[number] for number in first_numbers(chunks, TRAIN, n_tokens)]
        self._held_out = [chunks[number] for number in first_numbers(chunks, HELD_OUT, n_tokens)]
        self._dense: list[Tensor] = []

    def curves(self) -> SparsityCurves:
        """With nothing measured yet."""
        spec = self._spec
        counter = ScoreRecorder(spec, self._weights, self._scores, FIRST_COUNTED)
        for _ in self._passes(counter):
            pass
        thresholds = counter.quantiles(SHARES)
        return SparsityCurves(thresholds, self._errors(thresholds), ())

    def measured(self, curves: SparsityCurves, targets: Sequence[float] = ()) -> SparsityCurves:
        """With these targets measured, and those that show where `auto` is."""

        def measure(target: float) -> Measurement:
            return self.measure(curves.at(target))

        found = [*map(measure, targets), *largest_within(measure)]
        return replace(curves, measured=tuple({each.target: each for each in found}.values()))

    def measure(self, thresholds: Thresholds) -> Measurement:
        """What the thresholds leave out on the held-out chunks, and what it does to the next token's distribution."""
        least = thresholds.least(self._spec, self._weights)
        sparse = replace(self._weights, vectors=self._weights.vectors | least)
        counter = ZeroCounter(self._spec, sparse)
        self._dense = self._dense or [*self._distributions(FfnRecorder(self._spec, self._weights), self._weights)]
        kl = [
            (theirs.exp() * (theirs - ours)).sum(1)
            for theirs, ours in zip(self._dense, self._distributions(counter, sparse), strict=True)
        ]
        return Measurement(thresholds.target, counter.share, max(0.0, float(torch.cat(kl).mean())))

    def _errors(self, thresholds: NDArray[np.float32]) -> NDArray[np.float32]:
        recorder = ErrorRecorder(self._spec, self._weights, self._scores, thresholds)
        errors, n_tokens = torch.zeros(thresholds.shape, dtype=torch.float64), 0
        for layer, hidden in self._passes(recorder):
            shares = recorder.missing / hidden.square().sum(1)
            errors[layer] += shares[:, FIRST_COUNTED:].double().sum(1)
            n_tokens += len(hidden) - FIRST_COUNTED if layer == 0 else 0
        return (errors / max(1, n_tokens)).numpy().astype(np.float32)

    def _passes(self, recorder: FfnRecorder) -> Iterator[tuple[int, Tensor]]:
        """Each fitted chunk's layers, with the states behind them (m, hidden)."""
        executor = ReferenceExecutor(self._spec, self._weights, max(map(len, self._fitted)), recorder)
        for number, chunk in enumerate(self._fitted):
            self._tell(FITTING, number, len(self._fitted))
            sequence = executor.cache.open_new()
            batch = Batch.of_sequence(sequence, 0, list(chunk))
            hidden = executor.run(batch, None, range(0))
            for layer in range(self._spec.n_layers):
                hidden = executor.run(batch, hidden, range(layer, layer + 1))
                yield layer, hidden
            executor.cache.close(sequence)

    def _distributions(self, ops: FfnRecorder, weights: ModelWeights) -> Iterator[Tensor]:
        """Log-probabilities of what follows each token of each held-out chunk, fp64 (m, vocab)."""
        executor = ReferenceExecutor(self._spec, weights, max(map(len, self._held_out)), ops)
        for number, chunk in enumerate(self._held_out):
            self._tell(MEASURING, number, len(self._held_out))
            sequence = executor.cache.open_new()
            rows = range(FIRST_COUNTED, len(chunk))
            logits = executor.logits(Batch.of_sequence(sequence, 0, list(chunk)), rows)
            executor.cache.close(sequence)
            yield torch.log_softmax(logits.double(), -1)

    def _tell(self, what: str, n_done: int, n_all: int) -> None:
        if self._progress:
            self._progress(what, n_done, n_all)


class ZeroCounter(FfnRecorder):
    """Counts the neurons that are not summed, those at 0 among them, but of the first tokens."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights) -> None:
        super().__init__(spec, weights)
        self._n_zeros = self._n_all = 0

    def watch(self, layer: int, active: Tensor, inner: Tensor, rows: Tensor) -> None:
        counted = active[FIRST_COUNTED:]
        self._n_zeros += int((counted == 0).sum())
        self._n_all += counted.numel()

    @property
    def share(self) -> float:
        """Of all neurons and tokens."""
        return self._n_zeros / max(1, self._n_all)


def weighted_scores(spec: ModelSpec, weights: ModelWeights) -> Scores:
    """|activation| x norm of the row of down."""
    norms = [down_norms(block, weights) for block in neuron_blocks(spec)]
    return lambda layer, active: active.abs() * norms[layer]
