"""Fits a calibration to the drafts of its chunks: predictors, thresholds and schedule.

Metrics of early exits are measured on held-out text: for each exit layer by itself, and for exits at the first open
gate. A depth is the number of layers that ran: b for a token that exits at exit layer b, n_layers for one that never
exits.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.predictor_fitting import PredictorTraining, calibrate_threshold, fit_predictor
from hetero_ee.calibration.schedule import ReadBytes, fit_schedule
from hetero_ee.calibration.stages import CHOOSE, HELD_OUT, TRAIN, is_in
from hetero_ee.calibration.traces import ChunkDrafts, PartialLogits, T, joined
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import (
    MAX_DRAFTS,
    NO_EXIT,
    Calibration,
    CalibrationText,
    DepthMetrics,
    ExitLayerCalibration,
    ExitLayerMetrics,
    FittedExitLayer,
)
from hetero_ee.speculation.exits.exit_map import ExitMap
from hetero_ee.speculation.exits.features import Floats
from hetero_ee.speculation.exits.predictor import ExitPredictor
from hetero_ee.speculation.exits.recent_exits import N_LAST, RADIUS, nearby

Flags = NDArray[np.bool_]
Judged = tuple[Floats, Flags]  # features of tokens, and whether their drafts are right


def fit_calibration(
    executor: Executor,
    chunks: Sequence[ChunkDrafts],
    partial_logits: Sequence[PartialLogits],
    maps: Mapping[int, ExitMap],
    text: CalibrationText,
    precision: float,
    training: PredictorTraining,
) -> Calibration:
    """Fit everything that early exits need.

    Args:
        executor: The executor whose model is calibrated. It runs nothing.
        chunks: Drafts of all chunks.
        partial_logits: Partial logits of the chunks of CHOOSE.
        maps: Exit maps by exit layer.
        text: Description of the calibration text.
        precision: Share of exits that have to be right when thresholds are chosen.
        training: Settings of the predictors.
    """
    spec = executor.spec
    train, choose = joined(of_part(chunks, TRAIN)), joined(of_part(chunks, CHOOSE))
    fits = _exit_layers(train, choose, maps, partial(judging, precision=precision, training=training))
    schedule = fit_schedule(fits, joined(partial_logits), ReadBytes.of(executor.blocks, executor.weights))
    held_out = of_part(chunks, HELD_OUT)
    metrics, depths = all_metrics(
        fits,
        [each.is_right for each in held_out],
        [each.is_right_unmapped for each in held_out],
        [opened(fits, each.features) for each in held_out],
    )
    exit_layers = tuple(
        ExitLayerCalibration(**{field.name: getattr(each, field.name) for field in fields(each)}, metrics=own)
        for each, own in zip(fits, metrics, strict=True)
    )
    return Calibration(spec.n_layers, spec.hidden_size, text, exit_layers, schedule.exit_layers, depths)


def judging(
    train: Judged, choose: Judged, precision: float, training: PredictorTraining
) -> tuple[ExitPredictor, float]:
    """Fit a predictor to the tokens `train`, and choose its threshold on the tokens `choose`."""
    predictor = fit_predictor(*train, training)
    features, is_right = choose
    return predictor, calibrate_threshold(predictor.probability(features), is_right, precision)


def _exit_layers(
    train: ChunkDrafts,
    choose: ChunkDrafts,
    maps: Mapping[int, ExitMap],
    judging: Callable[[Judged, Judged], tuple[ExitPredictor, float]],
) -> list[FittedExitLayer]:
    """Fit two predictors for each exit layer: one for tokens that it judges first, and a partial predictor.

    The partial predictor judges tokens whose candidates an earlier exit layer chose. Its threshold is chosen only on
    tokens that did not exit at that earlier layer, since only these reach the later one, and fewer of them are right.
    Without a threshold, the partial predictor is left out.
    """
    fits = []
    for index in range(len(train.features)):
        own = ((part.features[index], part.is_right[index]) for part in (train, choose))
        fits.append(FittedExitLayer(index + 1, maps.get(index + 1), *judging(*own)))
    passed = ~opened(fits, choose.features)  # (n_exit_layers, m)
    for index in range(1, len(fits)):
        first = choose.partial_first[index]
        comes_by = passed[first - 1, np.arange(len(first))]
        predictor, threshold = judging(
            (train.partial_features[index], train.partial_is_right[index]),
            (choose.partial_features[index][comes_by], choose.partial_is_right[index][comes_by]),
        )
        if threshold != NO_EXIT:
            fits[index] = replace(fits[index], partial_predictor=predictor, partial_threshold=threshold)
    return fits


def of_part(chunks: Sequence[T], part: tuple[int, ...]) -> list[T]:
    """Return the chunks of TRAIN, CHOOSE or HELD_OUT."""
    return [chunk for number, chunk in enumerate(chunks) if is_in(number, part)]


def all_metrics(
    exit_layers: Sequence[FittedExitLayer],
    is_right: Sequence[Flags],
    is_right_unmapped: Sequence[Flags],
    gate: Sequence[Flags],
) -> tuple[tuple[ExitLayerMetrics, ...], DepthMetrics]:
    """Return the metrics of each exit layer from 1 on, and of all together, from flags (n_exit_layers, m) per chunk."""
    found = []
    for index, each in enumerate(exit_layers):
        mapped, unmapped = (np.concatenate([flags[index] for flags in part]) for part in (is_right, is_right_unmapped))
        found.append(
            exit_layer_metrics(
                [flags[index] for flags in is_right],
                [flags[index] for flags in gate],
                agreement=float(unmapped.mean()),
                mapped_agreement=float(mapped.mean()) if each.exit_map else None,
            )
        )
    return tuple(found), depth_metrics(is_right, gate)


def opened(exit_layers: Sequence[FittedExitLayer], features: NDArray[np.float32]) -> Flags:
    """Return the tokens for which each exit layer's gate opens if judged there first, (n_exit_layers, m). The features
    are (n_exit_layers, m, 12)."""
    return np.stack([each.opens(own, is_partial=False) for each, own in zip(exit_layers, features, strict=True)])


def exit_layer_metrics(
    is_right: Sequence[Flags], gate: Sequence[Flags], agreement: float, mapped_agreement: float | None
) -> ExitLayerMetrics:
    """Return one exit layer's metrics from flags per chunk: whether a draft is right, and whether a token may exit."""
    right, opened = np.concatenate(is_right), np.concatenate(gate)
    kept = [0] * (MAX_DRAFTS + 1)
    n_drafts = 0
    for rights, gates in zip(is_right, gate, strict=True):
        n_drafts += _add_steps(rights, gates, kept)
    n_kept = sum(count * length for length, count in enumerate(kept))
    return ExitLayerMetrics(
        agreement=agreement,
        mapped_agreement=mapped_agreement,
        exit_rate=_share(int(opened.sum()), len(opened)),
        precision=_share(int((right & opened).sum()), int(opened.sum())),
        recall=_share(int((right & opened).sum()), int(right.sum())),
        acceptance=_share(n_kept, n_drafts),
        kept_drafts=tuple(kept),
        refused_precision=_share(int((right & ~opened).sum()), int((~opened).sum())),
    )


def depth_metrics(is_right: Sequence[Flags], gate: Sequence[Flags]) -> DepthMetrics:
    """Return the metrics of exits at the first open gate, from flags (n_layers - 1, m) per chunk."""
    n_layers = len(gate[0]) + 1
    depths = [_first_depths(each) for each in gate]
    histogram = np.bincount(np.concatenate(depths), minlength=n_layers + 1)[1:]
    near, covered = [], []
    for each in depths:
        recent: deque[int] = deque(maxlen=N_LAST)
        for depth in each.tolist():
            if recent:
                near.append(any(abs(depth - other) <= RADIUS for other in recent))
                covered.append(len(nearby(recent, n_layers)) / n_layers)
            recent.append(depth)
    return DepthMetrics(
        histogram=tuple(histogram.tolist()),
        mean_depth=float(np.concatenate(depths).mean()),
        oracle_mean_depth=float(np.concatenate([_first_depths(each) for each in is_right]).mean()),
        locality=float(np.mean(near)) if near else 0.0,
        near_share=float(np.mean(covered)) if covered else 0.0,
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _first_depths(gate: Flags) -> NDArray[np.int64]:
    """Return each token's depth: the first exit layer whose gate is open, or n_layers."""
    return np.where(gate.any(axis=0), gate.argmax(axis=0) + 1, len(gate) + 1)


def _add_steps(is_right: Flags, gate: Flags, kept: list[int]) -> int:
    """Simulate draft-verify steps on a chunk and count them in `kept` by accepted drafts. Return the drafts made."""
    n_drafts = start = 0
    while start < len(gate):
        window = slice(start, start + MAX_DRAFTS)
        drafted = _leading(gate[window])
        right = _leading(is_right[start : start + drafted])
        kept[right] += 1
        n_drafts += drafted
        start += right + 1
    return n_drafts


def _leading(flags: Flags) -> int:
    return len(flags) if flags.all() else int(flags.argmin())
