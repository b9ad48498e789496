"""Fits exit predictors.

A predictor maps a token's features to the probability that the exit layer's token is the full model's. Tokens whose
features are not finite are left out. All others have the same weight, so that the output is a probability. If all
labels are equal, the predictor always returns (n_right + 1/2) / (n + 1), since a sample can't prove probability 0 or 1.
All randomness comes from a seed, so that the same tokens give the same numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.errors import UsageError
from hetero_ee.speculation.exits.calibration import NO_EXIT
from hetero_ee.speculation.exits.features import Floats, is_finite
from hetero_ee.speculation.exits.predictor import ExitPredictor

Labels = NDArray[np.bool_]

MIN_EXITS = 20  # fewer exits don't determine a precision
BATCH_TOKENS = 256
LEARNING_RATE = 5e-3  # falls to 0 along a cosine
FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8  # Adam's, as published (arXiv 1412.6980)
WEIGHT_DECAY = 1e-2  # decoupled (arXiv 1711.05101), of weights only


@dataclass(frozen=True, slots=True)
class PredictorTraining:
    """Settings of AdamW on binary cross-entropy."""

    n_hidden: int = 64
    n_steps: int = 1500  # at most
    n_epochs: int = 100  # at most, as in SpecEE's code
    seed: int = 0

    def steps(self, n_tokens: int) -> int:
        """Return the number of steps for this many tokens."""
        return min(self.n_steps, self.n_epochs * -(-n_tokens // BATCH_TOKENS))


def fit_predictor(features: Floats, labels: Labels, training: PredictorTraining) -> ExitPredictor:
    """Fit a predictor to features (m, n_features) and labels (m,). Raises: UsageError: if no features are finite."""
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"features {features.shape} and labels {labels.shape}, expected (m, n) and (m,)")
    finite = is_finite(features)
    if not finite.any():
        raise UsageError(f"none of {len(labels)} calibration tokens has finite features; calibrate on more text.")
    values, labels = features[finite].astype(np.float64), labels[finite].astype(bool)
    mean, deviation = values.mean(0), values.std(0)
    # A column that hardly moves would turn noise of its last bits into a feature.
    is_moving = (deviation > 1e-6 * np.abs(mean)) & (deviation > 1e-12)
    scale = np.where(is_moving, deviation, 1.0)
    n_right, n = int(labels.sum()), len(labels)
    if 0 < n_right < n:
        standardised = ((values - mean) / scale).astype(np.float32)
        first, first_bias, second, second_bias = _trained(standardised, labels.astype(np.float32), training)
    else:
        first, first_bias, second = (np.zeros(shape, np.float32) for shape in ((1, values.shape[1]), 1, 1))
        second_bias = np.array([math.log((n_right + 0.5) / (n - n_right + 0.5))], np.float32)
    unscaled = first / scale  # the network reads unscaled features
    first_bias = (first_bias - unscaled @ mean).astype(np.float32)
    return ExitPredictor(unscaled.astype(np.float32), first_bias, second, second_bias)


def calibrate_threshold(
    probabilities: Floats, labels: Labels, precision: float, *, min_exits: int = MIN_EXITS
) -> float:
    """Return the lowest threshold at which a share `precision` of the exits is right, NO_EXIT if there isn't one.

    Args:
        probabilities: (m,), of tokens that the predictor was not fitted to. NaN never exits.
        labels: (m,), whether each token is right.
        precision: Share of exits that have to be right.
        min_exits: Number of tokens that have to exit at the threshold.
    """
    known = ~np.isnan(probabilities)
    order = np.argsort(-probabilities[known], kind="stable")
    ordered, right = probabilities[known][order], labels[known].astype(bool)[order].cumsum()
    exits = np.arange(1, len(ordered) + 1)
    # Tokens of one probability exit together: the counts after the last of them are the threshold's.
    is_last = np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)]
    reached = np.flatnonzero(is_last & (right >= precision * exits - 1e-9) & (exits >= min_exits))
    return float(ordered[reached[-1]]) if len(reached) else NO_EXIT


def _trained(features: Floats, labels: Floats, training: PredictorTraining) -> list[Floats]:
    """Train an ExitPredictor's parameters on standardised features (m, n_features) and labels (m,), 0 or 1.

    Uses NumPy: on a busy machine, torch's threads need a hundred times as long for matrices this small.
    """
    random = np.random.default_rng(training.seed)
    n_features, h = features.shape[1], training.n_hidden
    rate = labels.mean()
    parameters = [
        random.standard_normal((h, n_features), np.float32) * np.float32(math.sqrt(2 / n_features)),
        np.zeros(h, np.float32),
        random.standard_normal(h, np.float32) * np.float32(math.sqrt(1 / h)),
        np.array([math.log(rate / (1 - rate))], np.float32),
    ]
    moments = [(np.zeros_like(part), np.zeros_like(part)) for part in parameters]
    n_steps = training.steps(len(features))
    for step in range(n_steps):
        chosen = random.integers(0, len(features), BATCH_TOKENS)
        found = _gradients(parameters, features[chosen], labels[chosen])
        step_size = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / n_steps))
        corrected = step_size * math.sqrt(1 - SECOND_DECAY ** (step + 1)) / (1 - FIRST_DECAY ** (step + 1))
        for index, (part, (first, second), gradient) in enumerate(zip(parameters, moments, found, strict=True)):
            first += (1 - FIRST_DECAY) * (gradient - first)
            second += (1 - SECOND_DECAY) * (gradient * gradient - second)
            if index % 2 == 0:  # biases, at odd indices, don't decay
                part *= 1 - step_size * WEIGHT_DECAY
            part -= corrected * first / (np.sqrt(second) + EPSILON)
    return parameters


def _gradients(parameters: Sequence[Floats], features: Floats, labels: Floats) -> list[Floats]:
    first, first_bias, second, second_bias = parameters
    inner = np.maximum(features @ first.T + first_bias, 0)
    chance = 0.5 * (1 + np.tanh(0.5 * (inner @ second + second_bias)))
    error = (chance - labels) / np.float32(len(features))
    inner_error = np.outer(error, second)
    inner_error[inner <= 0] = 0
    return [inner_error.T @ features, inner_error.sum(0), inner.T @ error, error.sum(keepdims=True)]
