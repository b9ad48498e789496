"""From a calibration's rows to the calibration: predictors and thresholds, the schedule, and all figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.evaluation import metrics, opened
from hetero_ee.calibration.mlp_training import MlpTraining
from hetero_ee.calibration.predictor_fitting import fit_mlp
from hetero_ee.calibration.predictor_quality import NO_EXIT, calibrate_threshold
from hetero_ee.calibration.row_stage import RowStage
from hetero_ee.calibration.schedule_fitting import ReadBytes, fit_schedule
from hetero_ee.calibration.stages import CHOOSE, HELD_OUT, TRAIN, is_in
from hetero_ee.calibration.tensors import Arrays
from hetero_ee.calibration.walks import walks
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration, CalibrationText, ExitLayerCalibration, FittedExitLayer
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.sliced_logits import SlicedLogits

T = TypeVar("T", bound=np.generic)


def fit_calibration(
    executor: Executor,
    rows: RowStage,
    maps: Mapping[int, ExitMap],
    text: CalibrationText,
    activations: Arrays,
    precision: float,
    training: MlpTraining,
) -> Calibration:
    """precision: share of exits that have to be right where thresholds are chosen."""
    spec = executor.spec
    whole = [
        _fitted(exit_layer, rows, maps.get(exit_layer), precision, training) for exit_layer in range(1, spec.n_layers)
    ]
    gates = [opened(whole, list(features)) for features in rows.features]
    fits = [whole[0], *(_with_sliced(each, rows, gates, precision, training) for each in whole[1:])]
    read = ReadBytes.of(executor.blocks, executor.weights)
    choosing = [sliced for number, sliced in rows.sliced.items() if is_in(number, CHOOSE)]
    schedule = fit_schedule(fits, SlicedLogits.joined(choosing), read)
    held_out = [sliced for number, sliced in rows.sliced.items() if is_in(number, HELD_OUT)]
    walked = [walks(fits, schedule.exit_layers, sliced) for sliced in held_out]
    is_right, unmapped, gate = (_of_part(each, HELD_OUT) for each in (rows.is_right, rows.is_right_unmapped, gates))
    found = metrics(fits, is_right, unmapped, gate, walked)
    exit_layers = (
        ExitLayerCalibration(
            each.exit_layer,
            each.exit_map,
            each.predictor,
            each.threshold,
            each.sliced_predictor,
            each.sliced_threshold,
            own,
            walk,
        )
        for each, own, walk in zip(fits, found.exit_layers, found.walks, strict=True)
    )
    return Calibration(spec.n_layers, spec.hidden_size, text, tuple(exit_layers), schedule, found.depths, activations)


def _fitted(
    exit_layer: int, rows: RowStage, exit_map: ExitMap | None, precision: float, training: MlpTraining
) -> FittedExitLayer:
    """For rows whose first exit layer it is."""

    def of(values: Sequence[NDArray[T]], part: tuple[int, ...]) -> NDArray[T]:
        return _at(exit_layer, _of_part(values, part))

    predictor = fit_mlp(of(rows.features, TRAIN), of(rows.is_right, TRAIN), training=training)
    chances = predictor.probability(of(rows.features, CHOOSE))
    threshold = calibrate_threshold(chances, of(rows.is_right, CHOOSE), precision)
    return FittedExitLayer(exit_layer, exit_map, predictor, threshold, None, NO_EXIT)


def _with_sliced(
    fitted: FittedExitLayer,
    rows: RowStage,
    gates: Sequence[NDArray[np.bool_]],
    precision: float,
    training: MlpTraining,
) -> FittedExitLayer:
    """The same with what is needed for rows whose candidates an earlier exit layer took, if a threshold can be set.

    gates: of each chunk, (n_exit_layers, m), for rows whose first exit layer it is. The threshold is set on rows that
    this one let pass, as no others come here: of what is left fewer are right.
    """

    def of(values: Sequence[NDArray[T]], part: tuple[int, ...]) -> NDArray[T]:
        return _at(fitted.exit_layer, _of_part(values, part))

    predictor = fit_mlp(of(rows.sliced_features, TRAIN), of(rows.sliced_is_right, TRAIN), training=training)
    passed_gates = np.concatenate(_of_part(gates, CHOOSE), axis=1)
    first = of(rows.sliced_first, CHOOSE)
    comes_by = ~passed_gates[first - 1, np.arange(len(first))]
    chances = predictor.probability(of(rows.sliced_features, CHOOSE)[comes_by])
    threshold = calibrate_threshold(chances, of(rows.sliced_is_right, CHOOSE)[comes_by], precision)
    if threshold == NO_EXIT:
        return fitted
    return replace(fitted, sliced_predictor=predictor, sliced_threshold=threshold)


def _of_part(values: Sequence[NDArray[T]], part: tuple[int, ...]) -> list[NDArray[T]]:
    return [value for number, value in enumerate(values) if is_in(number, part)]


def _at(exit_layer: int, values: Sequence[NDArray[T]]) -> NDArray[T]:
    """One exit layer's rows of all chunks."""
    return np.concatenate([value[exit_layer - 1] for value in values])
