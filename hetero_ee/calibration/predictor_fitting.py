"""Predictors from calibration rows: features, and whether the layer's token was the full model's.

Rows whose features are not finite are left out. Rows weigh alike, so that a probability is one: a class that is rare
is not made up for, unless positive_weight says so, which then shifts every probability. Where all labels agree there is
nothing to tell apart, and the predictor answers the same for every row: (n_right + 1/2) / (n + 1), which neither 0 nor
1 row after row can prove.
Same rows, same numbers: whatever is random comes from a seed.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.mlp_training import MlpTraining, train_mlp
from hetero_ee.calibration.predictor_quality import MIN_EXITS, NO_EXIT, reaches
from hetero_ee.errors import UsageError
from hetero_ee.speculation.exits.candidates import N_CANDIDATES
from hetero_ee.speculation.exits.features import Floats, is_finite
from hetero_ee.speculation.exits.predictors import LogisticPredictor, MlpPredictor, ThresholdPredictor, top_and_gap

Doubles = NDArray[np.float64]
Labels = NDArray[np.bool_]

MAX_NEWTON_STEPS = 50
MAX_HALVINGS = 30
N_THRESHOLDS = 128  # tried for each of the two, at equal steps of rank


def fit_logistic(
    features: Floats, labels: Labels, *, ridge: float = 1.0, positive_weight: float = 1.0
) -> LogisticPredictor:
    """Logistic regression by Newton's method (iteratively reweighted least squares).

    features (m, n_features), labels (m,). ridge: pulls the weights of standardised features to 0 with this half square
    against the sum over rows; never the bias. Raises UsageError where no row is finite.
    """
    rows = _Rows.of(features, labels, positive_weight)
    if rows.constant is not None:
        found = np.append(np.zeros(features.shape[1]), rows.constant)
    else:
        design = np.column_stack([rows.standardised, np.ones(len(rows.labels))])
        penalty = np.append(np.full(features.shape[1], ridge), 0.0)
        found = _newton(design, rows.labels, rows.weights, penalty)
    return LogisticPredictor(rows.mean, rows.scale, found[:-1].astype(np.float32), found[-1:].astype(np.float32))


def fit_mlp(
    features: Floats, labels: Labels, *, training: MlpTraining | None = None, positive_weight: float = 1.0
) -> MlpPredictor:
    """SpecEE's network. features (m, n_features), labels (m,). Raises UsageError where no row is finite."""
    training = training or MlpTraining()
    rows = _Rows.of(features, labels, positive_weight)
    h = training.n_hidden
    if rows.constant is not None:
        shapes = (h, features.shape[1]), (h,), (h,)
        parameters = [*(np.zeros(shape, np.float32) for shape in shapes), np.array([rows.constant], np.float32)]
    else:
        values, targets, weights = (part.astype(np.float32) for part in (rows.standardised, rows.labels, rows.weights))
        parameters = train_mlp(values, targets, weights, training)
    return MlpPredictor(rows.mean, rows.scale, *parameters)


def fit_threshold(
    features: Floats, labels: Labels, *, precision: float = 0.99, n_candidates: int = N_CANDIDATES
) -> ThresholdPredictor:
    """Of all pairs of thresholds tried the one with which most rows exit, a share `precision` of them rightly.

    features (m, 3 n_candidates); where no pair reaches it, thresholds that no row meets. Raises UsageError where no row
    is finite.
    """
    features, labels = _finite_rows(features, labels)
    top, gap = top_and_gap(features[:, : 3 * n_candidates])
    top_steps, gap_steps = _steps(top), _steps(gap)
    exits, right = (_met(top[rows], gap[rows], top_steps, gap_steps) for rows in (slice(None), labels))
    reached = reaches(right, exits, precision) & (exits >= MIN_EXITS)
    if not reached.any():
        return ThresholdPredictor(n_candidates, NO_EXIT, NO_EXIT)
    best = np.unravel_index(np.where(reached, exits, 0).argmax(), exits.shape)
    return ThresholdPredictor(n_candidates, float(top_steps[best[0]]), float(gap_steps[best[1]]))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Finite rows ready to fit: standardised (m, n_features), labels and weights (m,), all float64; constant: the
    log-odds to answer where all labels agree, else None."""

    standardised: Doubles
    labels: Doubles
    weights: Doubles
    mean: Floats
    scale: Floats
    constant: float | None

    @classmethod
    def of(cls, features: Floats, labels: Labels, positive_weight: float) -> "_Rows":
        features, labels = _finite_rows(features, labels)
        values = features.astype(np.float64)
        mean, deviation = values.mean(0).astype(np.float32), values.std(0)
        # A column that hardly moves would turn noise of its last bits into a feature.
        is_moving = deviation > 1e-6 * np.abs(mean)
        scale = np.where(is_moving & (deviation > 1e-12), deviation, 1.0).astype(np.float32)
        n_right, n = int(labels.sum()), len(labels)
        constant = None if 0 < n_right < n else math.log((n_right + 0.5) / (n - n_right + 0.5))
        weights = np.where(labels, positive_weight, 1.0)
        return cls((values - mean) / scale, labels.astype(np.float64), weights, mean, scale, constant)


def _finite_rows(features: Floats, labels: Labels) -> tuple[Floats, Labels]:
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"features {features.shape} and labels {labels.shape}, expected (m, n) and (m,)")
    finite = is_finite(features)
    if not finite.any():
        raise UsageError(f"none of {len(labels)} calibration rows has finite features; calibrate on more text.")
    return features[finite], labels[finite].astype(bool)


def _newton(design: Doubles, labels: Doubles, weights: Doubles, penalty: Doubles) -> Doubles:
    """Minimises the penalised negative log-likelihood; steps that overshoot are halved."""
    found = np.zeros(design.shape[1])
    loss = _loss(design, labels, weights, penalty, found)
    for _ in range(MAX_NEWTON_STEPS):
        chance = 0.5 * (1.0 + np.tanh(0.5 * (design @ found)))
        gradient = design.T @ (weights * (chance - labels)) + penalty * found
        curvature = (design.T * (weights * chance * (1.0 - chance))) @ design + np.diag(penalty)
        # The bias has no penalty of its own: a trace of one keeps the matrix regular where all rows are certain.
        step = np.linalg.solve(curvature + 1e-9 * np.eye(len(found)), gradient)
        for _ in range(MAX_HALVINGS):
            new_loss = _loss(design, labels, weights, penalty, found - step)
            if new_loss <= loss:
                break
            step *= 0.5
        else:
            return found
        found, gain, loss = found - step, loss - new_loss, new_loss
        if gain <= 1e-10 * max(1.0, loss):
            break
    return found


def _loss(design: Doubles, labels: Doubles, weights: Doubles, penalty: Doubles, found: Doubles) -> float:
    total = design @ found
    return float(weights @ (np.logaddexp(0.0, total) - labels * total) + 0.5 * penalty @ found**2)


def _steps(values: Floats) -> Floats:
    """Ascending thresholds to try: values that occur, above 0."""
    ranks = np.linspace(0, len(values) - 1, N_THRESHOLDS).astype(int)
    return np.unique(np.maximum(np.sort(values)[ranks], np.finfo(np.float32).tiny))


def _met(top: Floats, gap: Floats, top_steps: Floats, gap_steps: Floats) -> NDArray[np.int64]:
    """How many rows meet each pair of thresholds: (len(top_steps), len(gap_steps))."""
    counts = np.zeros((len(top_steps) + 1, len(gap_steps) + 1), np.int64)
    np.add.at(counts, (np.searchsorted(top_steps, top, "right"), np.searchsorted(gap_steps, gap, "right")), 1)
    return counts[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1][1:, 1:]
