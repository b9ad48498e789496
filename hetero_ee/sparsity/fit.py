"""Fits a model's sparsity curves on text: two passes in plain torch, then measurements against the dense model."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.calibration.stages import TRAIN, Chunk, first_numbers
from hetero_ee.calibration.steps import KeptSteps
from hetero_ee.config import Progress
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.models.blocks import neuron_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.neurons import NeuronCounts
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.sparsity.curves import (
    SHARES,
    Measurement,
    SparsityCurves,
    Thresholds,
    down_norms,
    largest_within,
)
from hetero_ee.sparsity.held_out import HeldOut
from hetero_ee.sparsity.recorder import ErrorRecorder, FfnRecorder, ScoreRecorder, Scores
from hetero_ee.weights.model_weights import ModelWeights

PART_TOKENS = 1024  # to fit on, and to measure on
FITTING = "Fitting sparsity"


class SparsityFit:
    """Fits the curves of a neuron-major model on the chunks of TRAIN and measures them on those of HELD_OUT.

    A chunk's first tokens use all neurons and are not counted.

    Args:
        scores: Neuron scores; None for the scores that executors use.
        kept: Stores the results of both passes and all measurements, for one combination of model, chunks and scores.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        chunks: Sequence[Chunk],
        scores: Scores | None = None,
        n_tokens: int = PART_TOKENS,
        progress: Progress | None = None,
        kept: KeptSteps | None = None,
    ) -> None:
        self._spec, self._weights, self._progress = spec, weights, progress
        self._scores = scores or weighted_scores(spec, weights)
        self._fitted = [chunks[number] for number in first_numbers(chunks, TRAIN, n_tokens)]
        self._held_out = HeldOut(spec, weights, chunks, n_tokens, progress)
        self._kept = kept or KeptSteps()

    def curves(self) -> SparsityCurves:
        """Return fitted curves without measurements."""
        thresholds = self._kept.once("thresholds", lambda: {"": self._thresholds()})[""]
        errors = self._kept.once("errors", lambda: {"": self._errors(thresholds)})[""]
        return SparsityCurves(thresholds, errors, ())

    def measured(self, curves: SparsityCurves, targets: Sequence[float] = ()) -> SparsityCurves:
        """Add measurements of these targets and of the targets that `auto` needs."""

        def measured(target: float) -> NDArray[np.float64]:
            found = self.measure(curves.at(target))
            return np.array([found.share, found.kl_nats])

        def measure(target: float) -> Measurement:
            share, kl_nats = self._kept.once(f"measured {target}", lambda: {"": measured(target)})[""].tolist()
            return Measurement(target, share, kl_nats)

        found = [*map(measure, targets), *largest_within(measure)]
        return replace(curves, measured=tuple({each.target: each for each in found}.values()))

    def measure(self, thresholds: Thresholds) -> Measurement:
        """Measure on held-out chunks the share of neurons skipped and the change of the next-token distribution."""
        least = thresholds.least(self._spec, self._weights)
        sparse = replace(self._weights, vectors=self._weights.vectors | least)
        kl_nats, neurons = self._held_out.divergence(self._spec, sparse)
        used, _ = neurons.since(NeuronCounts()) or (0.0, 0.0)
        return Measurement(thresholds.target, 1 - used, kl_nats)

    def _thresholds(self) -> NDArray[np.float32]:
        counter = ScoreRecorder(self._spec, self._weights, self._scores)
        for _ in self._passes(counter):
            pass
        return counter.quantiles(SHARES)

    def _errors(self, thresholds: NDArray[np.float32]) -> NDArray[np.float32]:
        recorder = ErrorRecorder(self._spec, self._weights, self._scores, thresholds)
        errors, n_tokens = torch.zeros(thresholds.shape, dtype=torch.float64), 0
        for layer, hidden in self._passes(recorder):
            shares = recorder.missing / hidden.square().sum(1)
            errors[layer] += shares[:, FIRST_SPARSE:].double().sum(1)
            n_tokens += len(hidden) - FIRST_SPARSE if layer == 0 else 0
        return (errors / max(1, n_tokens)).numpy().astype(np.float32)

    def _passes(self, recorder: FfnRecorder) -> Iterator[tuple[int, Tensor]]:
        """Run the training chunks layer by layer, and yield each layer with the states (m, hidden) after it."""
        executor = ReferenceExecutor(self._spec, self._weights, max(map(len, self._fitted)), recorder)
        for number, chunk in enumerate(self._fitted):
            if self._progress:
                self._progress(FITTING, number, len(self._fitted))
            sequence = executor.cache.open_new()
            batch = Batch.of_sequence(sequence, 0, list(chunk))
            hidden = executor.run(batch, None, range(0))
            for layer in range(self._spec.n_layers):
                hidden = executor.run(batch, hidden, range(layer, layer + 1))
                yield layer, hidden
            executor.cache.close(sequence)


def weighted_scores(spec: ModelSpec, weights: ModelWeights) -> Scores:
    """Return a function that scores neurons by |activation| times the norm of their row of down."""
    norms = [down_norms(block, weights) for block in neuron_blocks(spec)]
    return lambda layer, active: active.abs() * norms[layer]
