"""How good a calibration is on other text than it was made with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.draft_rows import draft_rows
from hetero_ee.calibration.metrics import (
    BoundaryFigures,
    DepthFigures,
    Flags,
    boundary_figures,
    depth_figures,
    share_of,
)
from hetero_ee.calibration.traces import traces
from hetero_ee.calibration.walks import Walks, walks
from hetero_ee.planning.times.rounds import WalkRates
from hetero_ee.runtime.executors.reference import Executor
from hetero_ee.speculation.exits.calibration import Calibration, FittedBoundary


@dataclass(frozen=True, slots=True)
class Evaluation:
    """boundaries, walks: figures of boundary 1, 2, ..., alone and with the schedule's boundaries before it; n_tokens:
    that count."""

    boundaries: tuple[BoundaryFigures, ...]
    walks: tuple[WalkRates, ...]
    depths: DepthFigures
    n_tokens: int


def evaluate(executor: Executor, calibration: Calibration, chunks: Sequence[Sequence[int]]) -> Evaluation:
    """The calibration's maps, predictors, thresholds and schedule on these chunks, of at least two tokens each."""
    boundaries = calibration.boundaries
    maps = {each.boundary: each.exit_map for each in boundaries if each.exit_map is not None}
    is_right: list[Flags] = []
    unmapped: list[Flags] = []
    gate: list[Flags] = []
    walked: list[Walks] = []
    for found in traces(executor, chunks):
        rows = draft_rows(executor, found, maps, with_unmapped=True)
        is_right.append(rows.is_right)
        unmapped.append(rows.is_right_unmapped)
        gate.append(opened(boundaries, list(rows.features)))
        walked.append(walks(boundaries, calibration.schedule.boundaries, rows.sliced))
    return figures(boundaries, is_right, unmapped, gate, walked)


def figures(
    boundaries: Sequence[FittedBoundary],
    is_right: Sequence[Flags],
    is_right_unmapped: Sequence[Flags],
    gate: Sequence[Flags],
    walked: Sequence[Walks],
) -> Evaluation:
    """All flags: for each chunk (n_boundaries, m). walked: of each chunk, or of the first ones."""
    found = []
    for place, each in enumerate(boundaries):
        mapped, unmapped = (np.concatenate([flags[place] for flags in part]) for part in (is_right, is_right_unmapped))
        found.append(
            boundary_figures(
                [flags[place] for flags in is_right],
                [flags[place] for flags in gate],
                agreement=share_of(int(unmapped.sum()), len(unmapped)),
                mapped_agreement=share_of(int(mapped.sum()), len(mapped)) if each.exit_map else None,
            )
        )
    n_tokens = sum(flags.shape[1] for flags in is_right)
    return Evaluation(tuple(found), Walks.joined(walked).figures(), depth_figures(is_right, gate), n_tokens)


def opened(boundaries: Sequence[FittedBoundary], features: Sequence[NDArray[np.float32]]) -> Flags:
    """Where the gate of each boundary opens, being a row's first: (n_boundaries, m). features: (m, 12) of each."""
    return np.stack([each.opens(own, is_sliced=False) for each, own in zip(boundaries, features, strict=True)])
