"""Fits a calibration to the drafts of its chunks: predictors, thresholds, schedule, gates and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.gate_fitting import fit_gates
from hetero_ee.calibration.metrics import all_metrics, opened
from hetero_ee.calibration.predictor_fitting import PredictorTraining, calibrate_threshold, fit_predictor
from hetero_ee.calibration.schedule import ReadBytes, fit_schedule
from hetero_ee.calibration.stages import CHOOSE, HELD_OUT, TRAIN, is_in
from hetero_ee.calibration.traces import ChunkDrafts, PartialLogits, joined
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import (
    NO_EXIT,
    Calibration,
    CalibrationText,
    ExitLayerCalibration,
    FittedExitLayer,
)
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.weights.store.record import Arrays


def fit_calibration(
    executor: Executor,
    chunks: Sequence[ChunkDrafts],
    partial: Sequence[PartialLogits],
    maps: Mapping[int, ExitMap],
    text: CalibrationText,
    activations: Arrays,
    precision: float,
    training: PredictorTraining,
) -> Calibration:
    """Fit everything that early exits need.

    Args:
        executor: Only its model is used.
        chunks: Drafts of all chunks.
        partial: Partial logits of the chunks of CHOOSE.
        maps: Exit maps by exit layer.
        text: Description of the calibration text.
        activations: Means per token, by name.
        precision: Share of exits that have to be right when thresholds are chosen.
        training: Settings of the predictors.
    """
    spec = executor.spec
    train, choose = joined(_of_part(chunks, TRAIN)), joined(_of_part(chunks, CHOOSE))
    whole = [_fitted(each, train, choose, maps.get(each), precision, training) for each in range(1, spec.n_layers)]
    passed = ~opened(whole, choose.features)
    fits = [whole[0], *(_with_partial(each, train, choose, passed, precision, training) for each in whole[1:])]
    schedule = fit_schedule(fits, joined(partial), ReadBytes.of(executor.blocks, executor.weights))
    gates = fit_gates(train.features, train.is_right, schedule.exit_layers, training)
    held_out = _of_part(chunks, HELD_OUT)
    metrics, depths = all_metrics(
        fits,
        [each.is_right for each in held_out],
        [each.is_right_unmapped for each in held_out],
        [opened(fits, each.features) for each in held_out],
    )
    exit_layers = tuple(
        ExitLayerCalibration(
            each.exit_layer,
            each.exit_map,
            each.predictor,
            each.threshold,
            each.partial_predictor,
            each.partial_threshold,
            gates.get(each.exit_layer),
            metrics=own,
        )
        for each, own in zip(fits, metrics, strict=True)
    )
    return Calibration(spec.n_layers, spec.hidden_size, text, exit_layers, schedule.exit_layers, depths, activations)


def _fitted(
    exit_layer: int,
    train: ChunkDrafts,
    choose: ChunkDrafts,
    exit_map: ExitMap | None,
    precision: float,
    training: PredictorTraining,
) -> FittedExitLayer:
    """Fit the predictor for tokens that are judged at this exit layer first."""
    index = exit_layer - 1
    predictor = fit_predictor(train.features[index], train.is_right[index], training)
    probabilities = predictor.probability(choose.features[index])
    threshold = calibrate_threshold(probabilities, choose.is_right[index], precision)
    return FittedExitLayer(exit_layer, exit_map, predictor, threshold)


def _with_partial(
    fitted: FittedExitLayer,
    train: ChunkDrafts,
    choose: ChunkDrafts,
    passed: NDArray[np.bool_],
    precision: float,
    training: PredictorTraining,
) -> FittedExitLayer:
    """Add a predictor for tokens whose candidates an earlier exit layer took, if it gets a threshold.

    The threshold is chosen only on tokens that did not exit where their candidates were taken, since no others arrive
    here and fewer of these are right.

    Args:
        passed: (n_exit_layers, m), whether the tokens of `choose` do not exit at their first exit layer.
    """
    index = fitted.exit_layer - 1
    predictor = fit_predictor(train.partial_features[index], train.partial_is_right[index], training)
    first = choose.partial_first[index]
    comes_by = passed[first - 1, np.arange(len(first))]
    probabilities = predictor.probability(choose.partial_features[index][comes_by])
    threshold = calibrate_threshold(probabilities, choose.partial_is_right[index][comes_by], precision)
    if threshold == NO_EXIT:
        return fitted
    return replace(fitted, partial_predictor=predictor, partial_threshold=threshold)


def _of_part(chunks: Sequence[ChunkDrafts], part: tuple[int, ...]) -> list[ChunkDrafts]:
    return [chunk for number, chunk in enumerate(chunks) if is_in(number, part)]
