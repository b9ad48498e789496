"""The joint gate's loss against what it is an average of, and gates fitted to tokens whose features tell."""

import numpy as np
import pytest

from hetero_ee.calibration.predictor_fitting import PRICE, PredictorTraining, fit_gates, gradients
from hetero_ee.errors import UsageError
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.predictor import ExitPredictor

TRAINING = PredictorTraining(n_steps=400)
N_LAYERS, LAYERS = 6, (2, 3, 5)


def expected_cost(gates: np.ndarray, costs: np.ndarray, price: float) -> np.ndarray:
    """Of a token that exits at each gate with probability P_l = g_l (1 - g_1) ... (1 - g_{l-1})."""
    comes_by, found = np.ones(gates.shape[1]), np.zeros(gates.shape[1])
    for gate, cost in zip(gates, costs, strict=True):
        found += comes_by * gate * cost
        comes_by = comes_by * (1 - gate)
    return found + comes_by * price


def test_the_gradient_is_that_of_the_expected_cost() -> None:
    random = np.random.default_rng(0)
    z, costs = random.normal(size=(4, 7)), random.random((4, 7))
    sigmoid = lambda each: 1 / (1 + np.exp(-each))  # noqa: E731
    found, step = gradients(sigmoid(z), costs, 0.4), 1e-6
    for place in range(4):
        moved = z.copy()
        moved[place] += step
        slope = (expected_cost(sigmoid(moved), costs, 0.4) - expected_cost(sigmoid(z), costs, 0.4)) / step
        assert np.allclose(found[place], slope, atol=1e-5)


def tokens(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels by exit layer: deeper ones are surer, and the surer the more often right."""
    random = np.random.default_rng(seed)
    features, is_right = [], []
    hardness = random.uniform(0, 4, n)
    for exit_layer in range(1, N_LAYERS):
        logits = -np.sort(-random.standard_normal((n, 4)), axis=1)
        logits[:, 0] += np.maximum(0, exit_layer - hardness)
        features.append(exit_features(logits.astype(np.float32), np.zeros((n, 4), np.float32)))
        is_right.append(random.random(n) < 1 / (1 + np.exp(-3 * (exit_layer - hardness))))
    return np.stack(features), np.stack(is_right)


def opened(gates: dict[int, ExitPredictor], features: np.ndarray) -> np.ndarray:
    return np.stack([gates[layer].probability(features[layer - 1]) >= 0.5 for layer in LAYERS])


def mean_cost(opens: np.ndarray, is_right: np.ndarray) -> float:
    """As the loss counts it, with gates that are open or not."""
    right = is_right[[layer - 1 for layer in LAYERS]]
    costs = ~right + PRICE * np.array(LAYERS)[:, None] / N_LAYERS
    return float(expected_cost(opens.astype(float), costs, PRICE).mean())


def test_gates_cost_less_than_any_one_exit_layer_or_none() -> None:
    features, is_right = tokens(1, 4000)
    gates = fit_gates(features, is_right, LAYERS, TRAINING)
    assert list(gates) == list(LAYERS)
    others = tokens(2, 4000)
    opens = opened(gates, others[0])
    found = mean_cost(opens, others[1])
    assert 0.1 < opens.any(0).mean() < 0.95
    for number in range(len(LAYERS)):
        alone = np.zeros_like(opens)
        alone[number] = True
        assert found < mean_cost(alone, others[1]) - 0.01
    assert found < mean_cost(np.zeros_like(opens), others[1]) - 0.01


def test_the_dearer_the_layers_the_more_tokens_exit() -> None:
    features, is_right = tokens(3, 3000)
    shares = [
        opened(fit_gates(features, is_right, LAYERS, TRAINING, price), features).any(0).mean()
        for price in (0.05, 0.3, 0.9)
    ]
    assert shares == sorted(shares) and shares[0] < shares[-1] - 0.05


def test_each_gate_is_logistic_in_the_features() -> None:
    features, is_right = tokens(4, 500)
    gate = fit_gates(features, is_right, LAYERS, TRAINING)[3]
    z = features[2] @ gate.first[0] + gate.first_bias[0]
    assert np.allclose(gate.probability(features[2]), 1 / (1 + np.exp(-z)), atol=1e-5)


def test_the_same_tokens_give_the_same_gates_and_spoiled_ones_none() -> None:
    features, is_right = tokens(5, 300)
    ours = fit_gates(features, is_right, LAYERS, TRAINING)
    spoiled = np.concatenate([features, np.full_like(features[:, :7], np.nan)], axis=1)
    theirs = fit_gates(spoiled, np.concatenate([is_right, is_right[:, :7]], axis=1), LAYERS, TRAINING)
    for layer in LAYERS:
        assert ours[layer].first.tolist() == theirs[layer].first.tolist()
    assert fit_gates(features, is_right, (), TRAINING) == {}
    with pytest.raises(UsageError, match="none of 300 calibration tokens has finite features"):
        fit_gates(np.full_like(features, np.inf), is_right, LAYERS, TRAINING)
