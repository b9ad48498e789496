"""Features of a row, held to the operation exit_predictor and to what each column is said to be."""

import numpy as np
import pytest
import torch

from hetero_ee.speculation.exits.features import (
    RICH_NAMES,
    candidate_mass,
    exit_features,
    feature_names,
    is_finite,
    rich_features,
    source_agreement,
)
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


def test_written_to_where_the_caller_says() -> None:
    logits, out = random(1, 3, 4), np.empty((3, 12), np.float32)
    found = exit_features(logits, np.zeros((3, 4), np.float32), out)
    assert found is out
    np.testing.assert_array_equal(out, exit_features(logits, np.zeros((3, 4), np.float32)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_logit_is_seen_in_its_row_alone_and_stays_seen(bad: float) -> None:
    logits, previous = random(1, 4, 4), np.zeros((4, 4), np.float32)
    good = exit_features(logits, previous.copy())
    logits[2, 1] = bad
    with np.errstate(all="raise"):
        found = exit_features(logits, previous)
        assert is_finite(found).tolist() == [True, True, False, True]
        assert is_finite(rich_features(found)).tolist() == [True, True, False, True]
    np.testing.assert_array_equal(found[[0, 1, 3]], good[[0, 1, 3]])


def test_extremes_are_no_fault() -> None:
    logits = np.array([[3e38, -3e38, 0, 1], [-200, -200, -200, -200]], np.float32)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        features = exit_features(logits, np.zeros((2, 4), np.float32))
        rich = rich_features(features)
    np.testing.assert_array_equal(features[:, 4:8], [[1, 0, 0, 0], [0.25] * 4])
    assert is_finite(rich[1:]).all()


def test_the_richer_columns_are_what_they_say() -> None:
    previous = np.full((1, 4), 0.25, np.float32)
    features = exit_features(np.log(np.array([[2, 5, 1, 2]], np.float32)), previous)
    rich = rich_features(features, np.array([0.5], np.float32), np.array([0.9], np.float32))
    named = dict(zip(feature_names(4, is_rich=True), rich[0].tolist(), strict=True))
    assert named["top_probability"] == pytest.approx(0.5)
    assert named["probability_gap"] == pytest.approx(0.3)
    assert named["logit_gap"] == pytest.approx(np.log(2.5), abs=1e-6)
    assert named["entropy"] == pytest.approx(-(0.4 * np.log(0.2) + 0.5 * np.log(0.5) + 0.1 * np.log(0.1)), abs=1e-6)
    assert named["top_change"] == pytest.approx(0.25)
    assert (named["rank"], named["agreement"], named["mass"]) == (1.0, 0.5, pytest.approx(0.9))
    assert [named[f"probability_{i}"] for i in range(4)] == pytest.approx([0.2, 0.5, 0.1, 0.2])


def test_names_and_columns_agree() -> None:
    for k in (1, 4):
        features = exit_features(random(1, 2, k), np.zeros((2, k), np.float32))
        assert len(feature_names(k)) == features.shape[1] == 3 * k
        rich = rich_features(features)
        assert len(feature_names(k, is_rich=True)) == rich.shape[1] == 3 * k + len(RICH_NAMES)
        assert rich[0, -1] == 1.0 and rich[0, -2] == 0.0


@pytest.mark.parametrize(("proposed", "expected"), [([], 0.0), ([3, 5], 1.0), ([5, 3], 0.5), ([5], 0.0)])
def test_agreement_with_a_source(proposed: list[int], expected: float) -> None:
    assert source_agreement(3, proposed) == expected


def test_the_mass_of_candidates() -> None:
    logits = random(3, 2, 50, scale=4.0)
    softmax = torch.softmax(torch.from_numpy(logits).double(), 1)
    chosen = torch.topk(softmax, 4)
    found = candidate_mass(np.take_along_axis(logits, chosen.indices.numpy(), 1), logits)
    np.testing.assert_allclose(found, chosen.values.sum(1).numpy(), rtol=1e-5)
