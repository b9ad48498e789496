"""How good a predictor is on rows it was not fitted to, and the threshold at which it is good enough."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_EXIT = 2.0  # a threshold that no probability reaches
MIN_EXITS = 20  # fewer exits on the held-out rows say nothing of a precision


@dataclass(frozen=True, slots=True)
class PredictorQuality:
    """precision: of the rows that exit, the share that is right, 0 where none exits; recall: of the rows that are
    right, the share that exits, 0 where none is; exit_rate: of all rows, those not finite included."""

    precision: float
    recall: float
    exit_rate: float


def quality(probabilities: NDArray[np.floating], labels: NDArray[np.bool_], threshold: float) -> PredictorQuality:
    """probabilities (m,), NaN never exits; labels (m,): right or not; a row exits at probability >= threshold."""
    labels = labels.astype(bool)
    exits = probabilities >= threshold
    n_exits, n_right, n_both = int(exits.sum()), int(labels.sum()), int((exits & labels).sum())
    return PredictorQuality(
        precision=n_both / n_exits if n_exits else 0.0,
        recall=n_both / n_right if n_right else 0.0,
        exit_rate=n_exits / len(labels) if len(labels) else 0.0,
    )


def calibrate_threshold(
    probabilities: NDArray[np.floating], labels: NDArray[np.bool_], precision: float, *, min_exits: int = MIN_EXITS
) -> float:
    """The least threshold at which a share `precision` of the rows that exit is right; NO_EXIT where none is.

    probabilities (m,) and labels (m,) of held-out rows; NaN never exits. At least min_exits rows have to exit.
    """
    known = ~np.isnan(probabilities)
    order = np.argsort(-probabilities[known], kind="stable")
    ordered, right = probabilities[known][order], labels[known].astype(bool)[order].cumsum()
    exits = np.arange(1, len(ordered) + 1)
    # Rows of one probability exit together: the counts behind the last of them are the threshold's.
    is_last = np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)]
    reached = np.flatnonzero(is_last & reaches(right, exits, precision) & (exits >= min_exits))
    return float(ordered[reached[-1]]) if len(reached) else NO_EXIT


def reaches(right: NDArray[np.int64], exits: NDArray[np.int64], precision: float) -> NDArray[np.bool_]:
    """Where right / exits is at least precision; True where nothing exits."""
    return np.asarray(right >= precision * exits - 1e-9)
