"""The exit predictor: checked against what judges on a GPU, safe for tokens that mean nothing."""

import numpy as np
import pytest
import torch

from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.predictor import ExitConfidence, ExitPredictor
from hetero_ee_kernels.reference import judged


def random(seed: int, *shape: int, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale + mean).astype(np.float32)


def predictor_of(n_hidden: int = 64) -> ExitPredictor:
    """Its hidden units are about half of them active on the features below."""
    mean = np.array([8.0] * 4 + [0.25] * 4 + [0.1] * 4, np.float32)
    scale = np.array([2.0] * 4 + [0.3] * 8, np.float32)
    first, second = random(3, n_hidden, 12, scale=0.3) / scale, random(4, n_hidden, scale=1.5 * n_hidden**-0.5)
    return ExitPredictor(first, random(5, n_hidden, mean=1.0) - first @ mean, second, random(6, 1))


def features(m: int, seed: int = 7) -> np.ndarray:
    return exit_features(random(seed, m, 4, scale=2.0, mean=8.0), np.full((m, 4), 0.25, np.float32))


@pytest.mark.parametrize("n_hidden", [1, 64, 512])
def test_features_and_network_are_the_gpus(n_hidden: int) -> None:
    """Of tokens that no exit layer has judged before, as a GPU judges them."""
    predictor = predictor_of(n_hidden)
    network = ExitConfidence(predictor).network
    logits = -np.sort(-random(1, 6, 4, scale=2.0, mean=8.0))
    found = predictor.probability(exit_features(logits, np.zeros((6, 4), np.float32)))
    expected = [float(judged(torch.from_numpy(row), *network)) for row in logits]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert found.std() > 0.01


def test_the_network_is_what_its_parameters_say() -> None:
    predictor, rows = predictor_of(), features(9).astype(np.float64)
    inner = np.maximum(rows @ predictor.first.T + predictor.first_bias, 0)
    expected = 1 / (1 + np.exp(-(inner @ predictor.second + predictor.second_bias)))
    np.testing.assert_allclose(predictor.probability(features(9)), expected, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_means_nothing_reaches_no_threshold_and_harms_no_other(bad: float) -> None:
    predictor, rows = predictor_of(), features(5)
    good = predictor.probability(rows.copy())
    rows[1, 5], rows[3, 0] = bad, bad
    with np.errstate(all="raise"):
        found = predictor.probability(rows)
    assert np.isnan(found[[1, 3]]).all() and not (found[[1, 3]] >= 0).any()
    np.testing.assert_allclose(found[[0, 2, 4]], good[[0, 2, 4]], atol=1e-6)
    assert np.isnan(predictor.probability(np.full((1, 12), bad, np.float32))).all()


def test_answers_are_chances_whatever_the_logits() -> None:
    logits = np.array([[1e4, -1e4, 0, 3], [-1e4, -1e4, -1e4, -1e4], [0, 0, 0, 0]], np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = predictor_of().probability(exit_features(logits, np.zeros((3, 4), np.float32)))
    assert found.dtype == np.float32 and ((found >= 0) & (found <= 1)).all()


def test_other_columns_are_refused() -> None:
    for rows in (features(2)[:, :11], features(1)[0], np.zeros((2, 20), np.float32)):
        with pytest.raises(ValueError, match=r"expected \(m, 12\)"):
            predictor_of().probability(rows)
