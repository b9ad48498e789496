"""Fits exits whose candidates come from a draft head or draft model (SpecEE, arXiv 2504.08850, sections 4 and 5.1).

At each exit layer a predictor judges the candidates' logits. If it is sure, the whole lm_head chooses a token, which is
emitted if it is a candidate. So an exit is right if that token is a candidate and the full model's token. The paper's
labels leave the candidates out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hetero_ee.calibration.schedule import ExitCosts, ReadBytes, choose_exit_layers, exit_histogram, n_scheduled
from hetero_ee.calibration.traces import DraftedChunk, Flags
from hetero_ee.speculation.exits.calibration import DraftedExitLayer, DraftedExits, DraftedMetrics
from hetero_ee.speculation.exits.features import Floats
from hetero_ee.speculation.exits.predictor import ExitPredictor

Judging = Callable[[tuple[Floats, Flags], tuple[Floats, Flags]], tuple[ExitPredictor, float]]


class DraftedParts(NamedTuple):
    """Chunks of TRAIN, CHOOSE and HELD_OUT, each joined."""

    train: DraftedChunk
    choose: DraftedChunk
    held_out: DraftedChunk


def fit_drafted(
    draft: str, parts: DraftedParts, own_bytes: Sequence[float], read: ReadBytes, fit: Judging
) -> DraftedExits:
    """Fit the exits and their schedule.

    Args:
        draft: Name of the draft.
        own_bytes: Bytes that judging at exit layer 1, 2, ... reads.
        read: Bytes of the model's parts.
        fit: Fits a predictor to some tokens, and its threshold to others.
    """
    train, choose, n_exit_layers = parts.train, parts.choose, len(own_bytes)
    exit_layers, exits = [], np.zeros((choose.drafted_is_known.shape[1], n_exit_layers + 1), np.bool_)
    for place in range(n_exit_layers):
        (features, is_right), chosen = choose.judged(place), choose.drafted_is_chosen[place]
        predictor, threshold = fit(train.judged(place), (features[chosen], is_right[chosen]))
        exits[:, place + 1] = is_right & (predictor.probability(features) >= threshold)
        metrics = _metrics(predictor, threshold, parts.held_out, place)
        exit_layers.append(DraftedExitLayer(predictor, threshold, metrics))
    costs = ExitCosts(exit_histogram(exits), read.layers, (0.0, *own_bytes))
    firsts, n_most = range(n_exit_layers, 0, -1), n_scheduled(n_exit_layers + 1)
    best = max((choose_exit_layers(costs, n_most, first) for first in firsts), key=lambda schedule: schedule.saved)
    return DraftedExits(draft, float(parts.held_out.drafted_is_known.mean()), tuple(exit_layers), best.exit_layers)


def _metrics(predictor: ExitPredictor, threshold: float, held_out: DraftedChunk, place: int) -> DraftedMetrics:
    is_sure = predictor.probability(held_out.drafted_features[place]) >= threshold
    exits, right = is_sure & held_out.drafted_is_chosen[place], held_out.drafted_is_right[place]
    n_exits, n_right, n_both = (int(flags.sum()) for flags in (exits, right, exits & right))
    return DraftedMetrics(
        oracle=float(right.mean()),
        exit_rate=float(exits.mean()),
        precision=n_both / n_exits if n_exits else 0.0,
        recall=n_both / n_right if n_right else 0.0,
    )
