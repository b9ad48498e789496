"""Fitted predictors on tokens whose chances are known, and thresholds checked against a search of all of them."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.calibration.predictor_fitting import PredictorTraining, calibrate_threshold, fit_predictor
from hetero_ee.errors import UsageError
from hetero_ee.speculation.exits.calibration import NO_EXIT
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.predictor import ExitPredictor

TRAINING = PredictorTraining()


def fitted(features: np.ndarray, labels: np.ndarray) -> ExitPredictor:
    return fit_predictor(features, labels, TRAINING)


def precision_and_rate(chances: np.ndarray, labels: np.ndarray, threshold: float) -> tuple[float, float]:
    """Of the tokens that exit the share that is right, 1 of none; and the share of all that exits."""
    exits = chances >= threshold
    return (float(labels[exits].mean()) if exits.any() else 1.0), float(exits.mean()) if len(exits) else 0.0


def parts(predictor: ExitPredictor) -> list[np.ndarray]:
    return [predictor.first, predictor.first_bias, predictor.second, predictor.second_bias]


def rows_of(seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and the true chance of each: sure candidates are right, where the sureness has not jumped.

    Candidates come nearly in order, as those of an earlier layer do.
    """
    random = np.random.default_rng(seed)
    logits = -np.sort(-random.standard_normal((n, 4)) * random.uniform(0.3, 4, (n, 1)), axis=1)
    logits = (logits + 0.2 * random.standard_normal((n, 4)) + 7).astype(np.float32)
    previous = random.dirichlet([1, 1, 1, 1], n).astype(np.float32)
    features = exit_features(logits, previous)
    top = features[:, 4:8].max(1)
    chance = 1 / (1 + np.exp(-(9 * top - 5 - 2 * np.abs(features[:, 8:]).sum(1))))
    return features, random.random(n) < chance, chance


def area_under_roc(scores: np.ndarray, labels: np.ndarray) -> float:
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable") + 1.0
    n_right = labels.sum()
    return float((ranks[labels].sum() - n_right * (n_right + 1) / 2) / (n_right * (~labels).sum()))


def test_nearly_as_good_as_knowing_the_chance() -> None:
    features, labels, _ = rows_of(1, 6000)
    held_out, its_labels, chance = rows_of(2, 6000)
    found = fitted(features, labels).probability(held_out)
    best, reached = area_under_roc(chance, its_labels), area_under_roc(found, its_labels)
    assert reached > best - 0.01
    for low in np.arange(0, 1, 0.2):
        there = (found >= low) & (found < low + 0.2)
        if there.sum() > 200:
            assert its_labels[there].mean() == pytest.approx(found[there].mean(), abs=0.08)


def test_the_same_rows_give_the_same_bits() -> None:
    features, labels, _ = rows_of(1, 500)
    first, second = (parts(fitted(features.copy(), labels.copy())) for _ in range(2))
    assert [array.tobytes() for array in first] == [array.tobytes() for array in second]


def test_the_network_learns_what_no_line_separates() -> None:
    rows = np.random.default_rng(6).standard_normal((4000, 12)).astype(np.float32)
    labels = rows[:, 0] * rows[:, 1] > 0
    found = fit_predictor(rows, labels, PredictorTraining(n_hidden=12)).probability(rows)
    assert ((found >= 0.5) == labels).mean() > 0.9


def test_another_seed_trains_another_network_as_good() -> None:
    features, labels, _ = rows_of(1, 4000)
    networks = [fit_predictor(features, labels, PredictorTraining(seed=seed)) for seed in (0, 1)]
    assert (networks[0].first != networks[1].first).any()
    areas = [area_under_roc(network.probability(features), labels) for network in networks]
    assert areas[0] == pytest.approx(areas[1], abs=0.01)


def test_bad_rows_are_left_out() -> None:
    features, labels, _ = rows_of(1, 500)
    bad = features[:4].copy()
    bad[:, 2] = [np.nan, np.inf, -np.inf, np.nan]
    found = fitted(np.concatenate([bad[:2], features, bad[2:]]), np.array([True, False, *labels, True, False]))
    for array, expected in zip(parts(found), parts(fitted(features, labels)), strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(("label", "expected"), [(True, 100.5 / 101), (False, 0.5 / 101)])
def test_labels_that_all_agree(label: bool, expected: float) -> None:
    features, _, _ = rows_of(1, 100)
    found = fitted(features, np.full(100, label))
    np.testing.assert_allclose(found.probability(rows_of(2, 50)[0]), expected, rtol=1e-4)


def test_rows_that_can_be_told_apart_perfectly() -> None:
    features, _, _ = rows_of(1, 400)
    labels = features[:, 4:8].max(1) > 0.7
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = fitted(features, labels).probability(features)
    assert ((found >= 0.5) == labels).mean() > 0.9 and ((found >= 0) & (found <= 1)).all()


def test_columns_that_never_move_and_columns_that_repeat_do_no_harm() -> None:
    features, labels, _ = rows_of(1, 1000)
    features[:, 1], features[:, 9] = 123.456, features[:, 8]
    found = fitted(features, labels)
    assert all(np.isfinite(array).all() for array in parts(found))
    assert area_under_roc(found.probability(features), labels) > 0.7


def test_without_a_row_there_is_nothing_to_fit() -> None:
    for features in (np.zeros((0, 12), np.float32), np.full((3, 12), np.nan, np.float32)):
        with pytest.raises(UsageError, match="calibrate on more text"):
            fitted(features, np.ones(len(features), bool))
    with pytest.raises(ValueError, match="expected"):
        fitted(np.zeros((3, 12), np.float32), np.ones(2, bool))


CHANCES = st.lists(st.tuples(st.sampled_from([np.nan, 0.0, 0.1, 0.5, 0.7, 1.0]), st.booleans()), max_size=30)


@given(rows=CHANCES, precision=st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_exits=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_the_least_threshold_that_reaches_the_goal(
    rows: list[tuple[float, bool]], precision: float, min_exits: int
) -> None:
    chances = np.array([chance for chance, _ in rows], np.float32)
    labels = np.array([label for _, label in rows], bool)
    found = calibrate_threshold(chances, labels, precision, min_exits=min_exits)
    good = []
    for threshold in chances:
        exits = chances >= threshold
        if exits.sum() >= min_exits and labels[exits].mean() >= precision:
            good.append(float(threshold))
    assert found == min(good, default=NO_EXIT)
    reached, exit_rate = precision_and_rate(chances, labels, found)
    assert exit_rate == 0 if not good else reached >= precision


def test_a_precision_reached_on_held_out_tokens() -> None:
    features, labels, _ = rows_of(1, 6000)
    held_out, its_labels, _ = rows_of(2, 6000)
    fresh, fresh_labels, _ = rows_of(3, 20_000)
    predictor = fitted(features, labels)
    threshold = calibrate_threshold(predictor.probability(held_out), its_labels, 0.85)
    precision, exit_rate = precision_and_rate(predictor.probability(fresh), fresh_labels, threshold)
    assert precision == pytest.approx(0.85, abs=0.02) and exit_rate > 0.05


@pytest.mark.slow
def test_fitting_is_quick() -> None:
    features, labels, _ = rows_of(1, 20_000)
    start = time.perf_counter()
    fitted(features, labels)
    assert time.perf_counter() - start < 10
