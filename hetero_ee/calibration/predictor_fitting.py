"""Fits exit predictors and the joint gate.

A predictor maps a token's features to the probability that the exit layer's token is the full model's. Tokens whose
features are not finite are left out. All others have the same weight, so that the output is a probability. If all
labels are equal, the predictor always returns (n_right + 1/2) / (n + 1), since a sample can't prove probability 0 or 1.
All randomness comes from a seed, so that the same tokens give the same numbers.

The joint gate consists of a logistic gate on a token's features at each of some exit layers, all fitted with one loss.
A token exits at layer l with probability P_l = g_l (1 - g_1) ... (1 - g_{l-1}), and runs every layer otherwise. The
loss is the expected cost: 1 for a wrong token, plus PRICE for all layers or their share of it. The gradient at gate l
is S_l g_l (1 - g_l) (c_l - V_{l+1}): S_l is the probability that the token arrives, c_l the cost of exiting at l, and
V_{l+1} the expected cost of continuing through the later gates. Source: JEI-DNN (arXiv 2310.09163, section 3). Its
gates see four measures of uncertainty, and its heads are trained with them. In this project the heads are fitted first,
and the gates use the features of features.py, so that every device can run them like other predictors.
"""

import math
from collections.abc import Callable, Sequence
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
PRICE = 0.3  # cost of running all layers, where a wrong token costs 1
CLOSED = -2.0  # initial bias of a gate: most tokens pass every gate, so that each learns


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
    _descend(
        parameters,
        lambda chosen: _gradients(parameters, features[chosen], labels[chosen]),
        len(features),
        random,
        training.steps(len(features)),
    )
    return parameters


def _descend(
    parameters: Sequence[Floats],
    gradients: Callable[[NDArray[np.int64]], Sequence[Floats]],
    n_tokens: int,
    random: np.random.Generator,
    n_steps: int,
) -> None:
    """Take n_steps of AdamW in place, each on randomly drawn tokens. Biases, at odd indices, don't decay."""
    moments = [(np.zeros_like(part), np.zeros_like(part)) for part in parameters]
    for step in range(n_steps):
        found = gradients(random.integers(0, n_tokens, BATCH_TOKENS))
        step_size = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / n_steps))
        corrected = step_size * math.sqrt(1 - SECOND_DECAY ** (step + 1)) / (1 - FIRST_DECAY ** (step + 1))
        for index, (part, (first, second), gradient) in enumerate(zip(parameters, moments, found, strict=True)):
            first += (1 - FIRST_DECAY) * (gradient - first)
            second += (1 - SECOND_DECAY) * (gradient * gradient - second)
            if index % 2 == 0:
                part *= 1 - step_size * WEIGHT_DECAY
            part -= corrected * first / (np.sqrt(second) + EPSILON)


def _gradients(parameters: Sequence[Floats], features: Floats, labels: Floats) -> list[Floats]:
    first, first_bias, second, second_bias = parameters
    inner = np.maximum(features @ first.T + first_bias, 0)
    chance = 0.5 * (1 + np.tanh(0.5 * (inner @ second + second_bias)))
    error = (chance - labels) / np.float32(len(features))
    inner_error = np.outer(error, second)
    inner_error[inner <= 0] = 0
    return [inner_error.T @ features, inner_error.sum(0), inner.T @ error, error.sum(keepdims=True)]


def fit_gates(
    features: Floats, is_right: Labels, exit_layers: Sequence[int], training: PredictorTraining, price: float = PRICE
) -> dict[int, ExitPredictor]:
    """Fit a gate for each of these exit layers, with two hidden units: z = relu(z) - relu(-z).

    Args:
        features: (n_layers - 1, m, n_features), by exit layer from 1 on.
        is_right: (n_layers - 1, m).
        exit_layers: Exit layers that get a gate.
        training: Settings, of which only the number of steps and the seed are used.
        price: Cost of running all layers, where a wrong token costs 1.

    Raises: UsageError: if no token has finite features.
    """
    if not exit_layers:
        return {}
    places = [exit_layer - 1 for exit_layer in exit_layers]
    features, is_right, n_layers = features[places], is_right[places], len(features) + 1
    finite = np.isfinite(features).all(2).all(0)
    if not finite.any():
        raise UsageError(f"none of {features.shape[1]} calibration tokens has finite features; calibrate on more text.")
    values = features[:, finite].astype(np.float64)
    mean, deviation = values.mean(1, keepdims=True), values.std(1, keepdims=True)
    scale = np.where(deviation > 1e-6 * np.abs(mean) + 1e-12, deviation, 1.0)
    costs = ~is_right[:, finite] + price / n_layers * np.array(exit_layers)[:, None]
    found, bias = _trained_gates(
        ((values - mean) / scale).astype(np.float32), costs.astype(np.float32), price, training
    )
    slope = found / scale[:, 0]  # gates read unscaled features
    bias = bias - (slope * mean[:, 0]).sum(1)
    return {exit_layer: _as_predictor(*each) for exit_layer, *each in zip(exit_layers, slope, bias, strict=True)}


def gradients(gates: Floats, costs: Floats, price: float) -> Floats:
    """Return the gradient of the expected cost with respect to each gate's z.

    Args:
        gates: (n, m), exit probabilities g.
        costs: (n, m), costs c of exiting at each gate.
        price: Cost of running all layers.
    """
    comes_by = np.cumprod(np.concatenate([np.ones_like(gates[:1]), 1 - gates[:-1]]), axis=0)
    found, later = np.empty_like(gates), np.full_like(gates[0], price)
    for place in reversed(range(len(gates))):
        gate = gates[place]
        found[place] = comes_by[place] * gate * (1 - gate) * (costs[place] - later)
        later = gate * costs[place] + (1 - gate) * later
    return found


def _trained_gates(features: Floats, costs: Floats, price: float, training: PredictorTraining) -> Sequence[Floats]:
    """Train gates on standardised features (n, m, n_features) and costs (n, m).

    Returns: Slopes (n, n_features) and biases (n,).
    """
    random = np.random.default_rng(training.seed)
    n, m, n_features = features.shape
    parameters = [np.zeros((n, n_features), np.float32), np.full(n, CLOSED, np.float32)]

    def gradients_of(chosen: NDArray[np.int64]) -> list[Floats]:
        some = features[:, chosen]
        gates: Floats = 0.5 * (
            1 + np.tanh(0.5 * ((some @ parameters[0][:, :, None])[:, :, 0] + parameters[1][:, None]))
        )
        error = gradients(gates, costs[:, chosen], price) / np.float32(BATCH_TOKENS)
        return [np.einsum("nm,nmf->nf", error, some), error.sum(1)]

    _descend(parameters, gradients_of, m, random, training.steps(m))
    return parameters


def _as_predictor(slope: NDArray[np.float64], bias: float) -> ExitPredictor:
    sign = np.array([1, -1], np.float32)
    return ExitPredictor(
        np.outer(sign, slope).astype(np.float32), sign * np.float32(bias), sign, np.zeros(1, np.float32)
    )
