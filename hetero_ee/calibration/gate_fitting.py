"""Fits the joint gate: a logistic gate on a token's features at each of some exit layers, all with one loss.

A token exits at layer l with probability P_l = g_l (1 - g_1) ... (1 - g_{l-1}), and runs every layer otherwise. The
loss is the expected cost: 1 for a wrong token, plus PRICE for all layers or their share of it. The gradient at gate l
is S_l g_l (1 - g_l) (c_l - V_{l+1}): the probability S_l that the token arrives, times the cost c_l of exiting here
less the expected cost V_{l+1} of continuing through the later gates.

Source: JEI-DNN (arXiv 2310.09163, section 3). Its gates see four measures of uncertainty and its heads are trained with
them. Here the heads are fitted before, and the gates use the features of features.py, so that every device can run them
like other predictors.
"""

from collections.abc import Sequence
from math import cos, pi

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.predictor_fitting import BATCH_TOKENS, LEARNING_RATE, Labels, PredictorTraining, update
from hetero_ee.errors import UsageError
from hetero_ee.speculation.exits.features import Floats
from hetero_ee.speculation.exits.predictor import ExitPredictor

PRICE = 0.3  # of running all layers, in wrong tokens
CLOSED = -2.0  # initial bias of a gate: most tokens pass every gate, so that each learns


def fit_gates(
    features: Floats,
    is_right: Labels,
    exit_layers: Sequence[int],
    training: PredictorTraining,
    price: float = PRICE,
) -> dict[int, ExitPredictor]:
    """Fit a gate for each of these exit layers, with two hidden units: z = relu(z) - relu(-z).

    Args:
        features: (n_layers - 1, m, n_features), by exit layer from 1 on.
        is_right: (n_layers - 1, m).
        exit_layers: Exit layers that get a gate.
        training: Its steps and seed are used.
        price: Cost of all layers, in wrong tokens.

    Raises:
        UsageError: No token has finite features.
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
    found, bias = _trained(((values - mean) / scale).astype(np.float32), costs.astype(np.float32), price, training)
    slope = found / scale[:, 0]  # gates read unscaled features
    bias = bias - (slope * mean[:, 0]).sum(1)
    return {exit_layer: _as_predictor(*each) for exit_layer, *each in zip(exit_layers, slope, bias, strict=True)}


def gradients(gates: Floats, costs: Floats, price: float) -> Floats:
    """Return the gradient of the expected cost with respect to each gate's z.

    Args:
        gates: (n, m), exit probabilities g.
        costs: (n, m), costs c of exiting there.
        price: Cost of running all layers.
    """
    comes_by = np.cumprod(np.concatenate([np.ones_like(gates[:1]), 1 - gates[:-1]]), axis=0)
    found, later = np.empty_like(gates), np.full_like(gates[0], price)
    for place in reversed(range(len(gates))):
        gate = gates[place]
        found[place] = comes_by[place] * gate * (1 - gate) * (costs[place] - later)
        later = gate * costs[place] + (1 - gate) * later
    return found


def _trained(features: Floats, costs: Floats, price: float, training: PredictorTraining) -> Sequence[Floats]:
    """Train on standardised features (n, m, n_features) and costs (n, m). Returns slopes (n, n_features) and biases
    (n,).
    """
    random = np.random.default_rng(training.seed)
    n, m, n_features = features.shape
    parameters = [np.zeros((n, n_features), np.float32), np.full(n, CLOSED, np.float32)]
    moments = [(np.zeros_like(part), np.zeros_like(part)) for part in parameters]
    for step in range(training.n_steps):
        chosen = random.integers(0, m, BATCH_TOKENS)
        some = features[:, chosen]
        gates: Floats = 0.5 * (
            1 + np.tanh(0.5 * ((some @ parameters[0][:, :, None])[:, :, 0] + parameters[1][:, None]))
        )
        error = gradients(gates, costs[:, chosen], price) / np.float32(BATCH_TOKENS)
        step_size = LEARNING_RATE * 0.5 * (1 + cos(pi * step / training.n_steps))
        update(parameters, moments, [np.einsum("nm,nmf->nf", error, some), error.sum(1)], step_size, step + 1)
    return parameters


def _as_predictor(slope: NDArray[np.float64], bias: float) -> ExitPredictor:
    sign = np.array([1, -1], np.float32)
    return ExitPredictor(
        np.outer(sign, slope).astype(np.float32), sign * np.float32(bias), sign, np.zeros(1, np.float32)
    )
