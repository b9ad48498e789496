"""Features of a row, held to what a GPU judges by and to what each column is said to be."""

import numpy as np
import pytest
import torch

from hetero_ee.speculation.exits.features import exit_features, is_finite
from hetero_ee_kernels.reference import judged


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_logits_softmax_and_its_change(k: int) -> None:
    previous, before = np.zeros((5, k), np.float32), torch.zeros(5, k)
    for layer in range(3):
        logits = random(layer, 5, k, scale=3.0)
        softmax = torch.softmax(torch.from_numpy(logits), 1)
        expected = torch.cat([torch.from_numpy(logits), softmax, softmax - before], 1)
        np.testing.assert_allclose(exit_features(logits, previous), expected.numpy(), atol=1e-6)
        np.testing.assert_allclose(previous, softmax.numpy(), atol=1e-6)
        before = softmax


def test_the_same_features_as_on_a_gpu() -> None:
    """That shows its own through a network that passes one of them on: relu(x + 100), logit / 100."""
    logits = -np.sort(-random(1, 5, 4, scale=3.0))
    found = exit_features(logits, np.zeros((5, 4), np.float32))
    for column in range(12):
        network = torch.zeros(1, 12), torch.tensor([100.0]), torch.tensor([0.01]), torch.tensor([-1.0])
        network[0][0, column] = 1.0
        chances = torch.stack([judged(torch.from_numpy(row), *network) for row in logits])
        np.testing.assert_allclose(found[:, column], torch.logit(chances.double()).numpy() * 100, atol=1e-4)


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
