"""Trains SpecEE's small network in numpy, seeded: the same rows give the same numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8  # Adam's, as published


@dataclass(frozen=True, slots=True)
class MlpTraining:
    """Adam (arXiv 1412.6980) on binary cross-entropy; the rate falls to 0 along a cosine. A number of steps, not of
    epochs: the time does not depend on the number of rows. decay: decoupled (arXiv 1711.05101), of the weights alone.
    """

    n_hidden: int = 64
    n_steps: int = 1500
    batch_rows: int = 256
    learning_rate: float = 5e-3
    decay: float = 1e-2
    seed: int = 0


def train_mlp(rows: Floats, labels: Floats, weights: Floats, training: MlpTraining) -> list[Floats]:
    """rows (m, n_features) standardised, labels (m,) 0 or 1, weights (m,) -> first (h, n_features), first_bias (h,),
    second (h,), second_bias (1,)."""
    random = np.random.default_rng(training.seed)
    n_features, h = rows.shape[1], training.n_hidden
    rate = np.average(labels, weights=weights)
    parameters = [
        random.standard_normal((h, n_features), np.float32) * np.float32(math.sqrt(2 / n_features)),
        np.zeros(h, np.float32),
        random.standard_normal(h, np.float32) * np.float32(math.sqrt(1 / h)),
        np.array([math.log(rate / (1 - rate))], np.float32),
    ]
    moments = [(np.zeros_like(part), np.zeros_like(part)) for part in parameters]
    for step in range(training.n_steps):
        chosen = random.integers(0, len(rows), training.batch_rows)
        gradients = _gradients(parameters, rows[chosen], labels[chosen], weights[chosen])
        speed = training.learning_rate * 0.5 * (1 + math.cos(math.pi * step / training.n_steps))
        _update(parameters, moments, gradients, speed, training.decay, step + 1)
    return parameters


def _gradients(parameters: Sequence[Floats], rows: Floats, labels: Floats, weights: Floats) -> list[Floats]:
    """Of the weighted mean cross-entropy over these rows, for each parameter."""
    first, first_bias, second, second_bias = parameters
    inner = np.maximum(rows @ first.T + first_bias, 0)
    chance = 0.5 * (1 + np.tanh(0.5 * (inner @ second + second_bias)))
    error = weights * (chance - labels) / np.float32(len(rows))
    inner_error = np.outer(error, second)
    inner_error[inner <= 0] = 0
    return [inner_error.T @ rows, inner_error.sum(0), inner.T @ error, error.sum(keepdims=True)]


def _update(
    parameters: Sequence[Floats],
    moments: Sequence[tuple[Floats, Floats]],
    gradients: Sequence[Floats],
    speed: float,
    decay: float,
    step: int,
) -> None:
    """One step of Adam, in place; biases, the odd ones, do not decay."""
    corrected = speed * math.sqrt(1 - SECOND_DECAY**step) / (1 - FIRST_DECAY**step)
    for place, (part, (first, second), gradient) in enumerate(zip(parameters, moments, gradients, strict=True)):
        first += (1 - FIRST_DECAY) * (gradient - first)
        second += (1 - SECOND_DECAY) * (gradient * gradient - second)
        if place % 2 == 0:
            part *= 1 - speed * decay
        part -= corrected * first / (np.sqrt(second) + EPSILON)
