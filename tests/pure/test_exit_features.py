"""Features of a row, held to the operation exit_predictor and to what each column is said to be."""

import numpy as np
import pytest
import torch

from hetero_ee.speculation.exits.features import exit_features, is_finite
from hetero_ee_kernels.reference import exit_predictor


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_the_same_features_as_the_operation(k: int) -> None:
    """The operation shows its features through a network that passes one of them on: relu(x + 100), logit / 100."""
    previous = np.zeros((5, k), np.float32)
    its_previous = torch.zeros(5, k)
    for layer in range(3):
        logits = random(layer, 5, k, scale=3.0)
        found = exit_features(logits, previous)
        for column in range(3 * k):
            first = torch.zeros(1, 3 * k)
            first[0, column] = 1.0
            chance = exit_predictor(
                torch.from_numpy(logits),
                its_previous.clone(),
                first,
                torch.tensor([100.0]),
                torch.tensor([0.01]),
                torch.tensor([-1.0]),
            ).double()
            shown = torch.logit(chance).numpy() * 100
            np.testing.assert_allclose(found[:, column], shown, atol=1e-4)
        exit_predictor(
            torch.from_numpy(logits),
            its_previous,
            torch.zeros(1, 3 * k),
            torch.zeros(1),
            torch.zeros(1),
            torch.zeros(1),
        )
        np.testing.assert_allclose(previous, its_previous.numpy(), atol=1e-6)


def test_the_first_layer_changes_from_nothing() -> None:
    previous = np.zeros((2, 4), np.float32)
    features = exit_features(random(1, 2, 4), previous)
    np.testing.assert_array_equal(features[:, 8:], features[:, 4:8])
    np.testing.assert_array_equal(previous, features[:, 4:8])
    again = exit_features(features[:, :4].copy(), previous)
    np.testing.assert_array_equal(again[:, 8:], np.zeros((2, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_logit_is_seen_in_its_row_alone_and_stays_seen(bad: float) -> None:
    logits, previous = random(1, 4, 4), np.zeros((4, 4), np.float32)
    good = exit_features(logits, previous.copy())
    logits[2, 1] = bad
    with np.errstate(all="raise"):
        found = exit_features(logits, previous)
        assert is_finite(found).tolist() == [True, True, False, True]
    np.testing.assert_array_equal(found[[0, 1, 3]], good[[0, 1, 3]])


def test_extremes_are_no_fault() -> None:
    logits = np.array([[3e38, -3e38, 0, 1], [-200, -200, -200, -200]], np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        features = exit_features(logits, np.zeros((2, 4), np.float32))
    np.testing.assert_array_equal(features[:, 4:8], [[1, 0, 0, 0], [0.25] * 4])
    assert is_finite(features).all()
