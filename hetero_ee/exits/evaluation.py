"""How good a calibration is on other text than it was made with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.exits.calibration import Calibration, FittedBoundary
from hetero_ee.exits.draft_rows import draft_rows
from hetero_ee.exits.figures import BoundaryFigures, DepthFigures, Flags, boundary_figures, depth_figures, share_of
from hetero_ee.exits.traces import traces
from hetero_ee.runtime.executor import Executor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """boundaries: figures of boundary 1, 2, ...; n_tokens: that count."""

    boundaries: tuple[BoundaryFigures, ...]
    depths: DepthFigures
    n_tokens: int


def evaluate(executor: Executor, calibration: Calibration, chunks: Sequence[Sequence[int]]) -> Evaluation:
    """The calibration's maps, predictors and thresholds on these chunks, of at least two tokens each."""
    is_right: list[Flags] = []
    unmapped: list[Flags] = []
    gate: list[Flags] = []
    for found in traces(executor, chunks):
        rows = [
            draft_rows(executor, found, each.boundary, each.exit_map, with_unmapped=True)
            for each in calibration.boundaries
        ]
        is_right.append(np.stack([each.is_right for each in rows]))
        unmapped.append(np.stack([each.is_right_unmapped for each in rows]))
        gate.append(opened(calibration.boundaries, [each.features for each in rows]))
    return figures(calibration.boundaries, is_right, unmapped, gate)


def figures(
    boundaries: Sequence[FittedBoundary],
    is_right: Sequence[Flags],
    is_right_unmapped: Sequence[Flags],
    gate: Sequence[Flags],
) -> Evaluation:
    """All flags: for each chunk (n_boundaries, m)."""
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
    return Evaluation(tuple(found), depth_figures(is_right, gate), n_tokens)


def opened(boundaries: Sequence[FittedBoundary], features: Sequence[NDArray[np.float32]]) -> Flags:
    """Where each boundary's gate opens, (n_boundaries, m). features: (m, 12) of each boundary."""
    return np.stack(
        [each.predictor.probability(own) >= each.threshold for each, own in zip(boundaries, features, strict=True)]
    )
