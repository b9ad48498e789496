"""How good a calibration is on other text than it was made with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.draft_rows import draft_rows
from hetero_ee.calibration.metrics import (
    DepthMetrics,
    ExitLayerMetrics,
    Flags,
    depth_figures,
    exit_layer_metrics,
    share_of,
)
from hetero_ee.calibration.traces import traces
from hetero_ee.calibration.walks import Walks, walks
from hetero_ee.planning.statistics import WalkRates
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration, FittedExitLayer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """exit_layers, walks: figures of exit layer 1, 2, ..., alone and with the schedule's exit layers before it;
    n_tokens: that count."""

    exit_layers: tuple[ExitLayerMetrics, ...]
    walks: tuple[WalkRates, ...]
    depths: DepthMetrics
    n_tokens: int


def evaluate(executor: Executor, calibration: Calibration, chunks: Sequence[Sequence[int]]) -> Evaluation:
    """The calibration's maps, predictors, thresholds and schedule on these chunks, of at least two tokens each."""
    exit_layers = calibration.exit_layers
    maps = {each.exit_layer: each.exit_map for each in exit_layers if each.exit_map is not None}
    is_right: list[Flags] = []
    unmapped: list[Flags] = []
    gate: list[Flags] = []
    walked: list[Walks] = []
    for found in traces(executor, chunks):
        rows = draft_rows(executor, found, maps, with_unmapped=True)
        is_right.append(rows.is_right)
        unmapped.append(rows.is_right_unmapped)
        gate.append(opened(exit_layers, list(rows.features)))
        walked.append(walks(exit_layers, calibration.schedule.exit_layers, rows.sliced))
    return metrics(exit_layers, is_right, unmapped, gate, walked)


def metrics(
    exit_layers: Sequence[FittedExitLayer],
    is_right: Sequence[Flags],
    is_right_unmapped: Sequence[Flags],
    gate: Sequence[Flags],
    walked: Sequence[Walks],
) -> Evaluation:
    """All flags: for each chunk (n_exit_layers, m). walked: of each chunk, or of the first ones."""
    found = []
    for place, each in enumerate(exit_layers):
        mapped, unmapped = (np.concatenate([flags[place] for flags in part]) for part in (is_right, is_right_unmapped))
        found.append(
            exit_layer_metrics(
                [flags[place] for flags in is_right],
                [flags[place] for flags in gate],
                agreement=share_of(int(unmapped.sum()), len(unmapped)),
                mapped_agreement=share_of(int(mapped.sum()), len(mapped)) if each.exit_map else None,
            )
        )
    n_tokens = sum(flags.shape[1] for flags in is_right)
    return Evaluation(tuple(found), Walks.joined(walked).metrics(), depth_figures(is_right, gate), n_tokens)


def opened(exit_layers: Sequence[FittedExitLayer], features: Sequence[NDArray[np.float32]]) -> Flags:
    """Where the gate of each exit layer opens, being a row's first: (n_exit_layers, m). features: (m, 12) of each."""
    return np.stack([each.opens(own, is_sliced=False) for each, own in zip(exit_layers, features, strict=True)])
