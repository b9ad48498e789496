"""Fitted predictors on rows whose chances are known, and thresholds held to a search of all of them."""

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from hetero_ee.calibration.mlp_training import MlpTraining
from hetero_ee.calibration.predictor_fitting import fit_logistic, fit_mlp, fit_threshold
from hetero_ee.calibration.predictor_quality import NO_EXIT, calibrate_threshold, quality
from hetero_ee.errors import UsageError
from hetero_ee.speculation.exits.features import exit_features, rich_features
from hetero_ee.speculation.exits.predictors import Predictor

FITS: dict[str, Callable[..., Predictor]] = {"mlp": fit_mlp, "logistic": fit_logistic, "threshold": fit_threshold}
LEARNED = ["mlp", "logistic"]


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


@pytest.mark.parametrize("kind", list(FITS))
def test_nearly_as_good_as_knowing_the_chance(kind: str) -> None:
    features, labels, _ = rows_of(1, 6000)
    held_out, its_labels, chance = rows_of(2, 6000)
    found = FITS[kind](features, labels).probability(held_out)
    best, reached = area_under_roc(chance, its_labels), area_under_roc(found, its_labels)
    assert reached > best - {"mlp": 0.01, "logistic": 0.04, "threshold": 0.06}[kind]
    if kind in LEARNED:
        for low in np.arange(0, 1, 0.2):
            there = (found >= low) & (found < low + 0.2)
            if there.sum() > 200:
                assert its_labels[there].mean() == pytest.approx(found[there].mean(), abs=0.08)


def test_the_logistic_regression_is_the_optimum() -> None:
    features, labels, _ = rows_of(3, 400)
    found = fit_logistic(features, labels, ridge=100.0, positive_weight=3.0)
    rows = np.column_stack([(features - found.mean) / found.scale, np.ones(len(labels))]).astype(np.float64)
    weights = np.where(labels, 3.0, 1.0)

    def loss(parameters: np.ndarray) -> float:
        total = rows @ parameters
        return float(weights @ (np.logaddexp(0, total) - labels * total) + 50 * parameters[:-1] @ parameters[:-1])

    best = minimize(loss, np.zeros(13), method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9})
    assert loss(np.append(found.weights, found.bias).astype(np.float64)) <= best.fun * (1 + 1e-6)


def test_the_richer_features_tell_more() -> None:
    random = np.random.default_rng(5)
    features, _, chance = rows_of(4, 4000)
    agreement = random.choice(np.array([0, 0.5, 1], np.float32), 4000)
    labels = random.random(4000) < chance * (0.4 + 0.6 * agreement)
    rich = rich_features(features, agreement)
    plain, more = (area_under_roc(fit_logistic(part, labels).probability(part), labels) for part in (features, rich))
    assert more > plain + 0.02


@pytest.mark.parametrize("kind", list(FITS))
def test_the_same_rows_give_the_same_bits(kind: str) -> None:
    features, labels, _ = rows_of(1, 500)
    first, second = (FITS[kind](features.copy(), labels.copy()).arrays() for _ in range(2))
    assert {name: array.tobytes() for name, array in first.items()} == {n: a.tobytes() for n, a in second.items()}


def test_the_network_learns_what_no_line_separates() -> None:
    rows = np.random.default_rng(6).standard_normal((4000, 12)).astype(np.float32)
    labels = rows[:, 0] * rows[:, 1] > 0
    found = fit_mlp(rows, labels, training=MlpTraining(n_hidden=12)).probability(rows)
    assert ((found >= 0.5) == labels).mean() > 0.9


def test_another_seed_trains_another_network_as_good() -> None:
    features, labels, _ = rows_of(1, 4000)
    networks = [fit_mlp(features, labels, training=MlpTraining(seed=seed)) for seed in (0, 1)]
    assert (networks[0].first != networks[1].first).any()
    areas = [area_under_roc(network.probability(features), labels) for network in networks]
    assert areas[0] == pytest.approx(areas[1], abs=0.01)


@pytest.mark.parametrize("kind", list(FITS))
def test_bad_rows_are_left_out(kind: str) -> None:
    features, labels, _ = rows_of(1, 500)
    bad = features[:4].copy()
    bad[:, 2] = [np.nan, np.inf, -np.inf, np.nan]
    found = FITS[kind](np.concatenate([bad[:2], features, bad[2:]]), np.array([True, False, *labels, True, False]))
    expected = FITS[kind](features, labels)
    for name, array in expected.arrays().items():
        np.testing.assert_array_equal(found.arrays()[name], array)


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize(("label", "expected"), [(True, 100.5 / 101), (False, 0.5 / 101)])
def test_labels_that_all_agree(kind: str, label: bool, expected: float) -> None:
    features, _, _ = rows_of(1, 100)
    found = FITS[kind](features, np.full(100, label))
    np.testing.assert_allclose(found.probability(rows_of(2, 50)[0]), expected, rtol=1e-4)


@pytest.mark.parametrize("kind", list(FITS))
def test_rows_that_can_be_told_apart_perfectly(kind: str) -> None:
    features, _, _ = rows_of(1, 400)
    labels = features[:, 4:8].max(1) > 0.7
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = FITS[kind](features, labels).probability(features)
    assert ((found >= 0.5) == labels).mean() > 0.9 and ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("kind", LEARNED)
def test_columns_that_never_move_and_columns_that_repeat_do_no_harm(kind: str) -> None:
    features, labels, _ = rows_of(1, 1000)
    features[:, 1], features[:, 9] = 123.456, features[:, 8]
    found = FITS[kind](features, labels)
    assert all(np.isfinite(array).all() for array in found.arrays().values())
    assert area_under_roc(found.probability(features), labels) > 0.7


@pytest.mark.parametrize("kind", list(FITS))
def test_without_a_row_there_is_nothing_to_fit(kind: str) -> None:
    for features in (np.zeros((0, 12), np.float32), np.full((3, 12), np.nan, np.float32)):
        with pytest.raises(UsageError, match="calibrate on more text"):
            FITS[kind](features, np.ones(len(features), bool))
    with pytest.raises(ValueError, match="expected"):
        FITS[kind](np.zeros((3, 12), np.float32), np.ones(2, bool))


def test_a_weight_on_right_rows_raises_every_chance() -> None:
    features, labels, _ = rows_of(1, 1000)
    for fit in (fit_logistic, fit_mlp):
        plain, heavy = (fit(features, labels, positive_weight=weight).probability(features) for weight in (1.0, 5.0))
        assert heavy.mean() > plain.mean() + 0.1


def test_the_thresholds_are_the_loosest_pair_that_is_precise_enough() -> None:
    features, labels, _ = rows_of(1, 100)
    found = fit_threshold(features, labels, precision=0.8)
    top = features[:, 4:8].max(1)
    gap = np.diff(np.sort(features[:, 4:8], 1), axis=1)[:, -1]
    best = 0
    for least_top in top:
        for least_gap in gap:
            exits = (top >= least_top) & (gap >= least_gap)
            if exits.sum() >= 20 and labels[exits].mean() >= 0.8:
                best = max(best, int(exits.sum()))
    measured = quality(found.probability(features), labels, 0.5)
    assert 20 <= best < 100 and round(measured.exit_rate * 100) == best and measured.precision >= 0.8


def test_no_thresholds_where_none_is_precise_enough() -> None:
    features, _, _ = rows_of(1, 200)
    features[0, 4:8] = [1, 0, 0, 0]
    found = fit_threshold(features, np.arange(200) % 2 == 0)
    assert quality(found.probability(features), np.ones(200, bool), 0.5).exit_rate == 0


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
    measured = quality(chances, labels, found)
    assert measured.exit_rate == 0 if not good else measured.precision >= precision


def test_quality_counts() -> None:
    chances = np.array([0.9, 0.8, np.nan, 0.2, 0.5])
    measured = quality(chances, np.array([True, False, True, True, True]), 0.5)
    assert (measured.precision, measured.recall, measured.exit_rate) == (2 / 3, 0.5, 0.6)
    nothing = quality(np.zeros(0), np.zeros(0, bool), 0.5)
    assert (nothing.precision, nothing.recall, nothing.exit_rate) == (0.0, 0.0, 0.0)


def test_a_goal_held_on_held_out_rows() -> None:
    features, labels, _ = rows_of(1, 6000)
    held_out, its_labels, _ = rows_of(2, 6000)
    fresh, fresh_labels, _ = rows_of(3, 20_000)
    predictor = fit_logistic(features, labels)
    threshold = calibrate_threshold(predictor.probability(held_out), its_labels, 0.85)
    measured = quality(predictor.probability(fresh), fresh_labels, threshold)
    assert measured.precision == pytest.approx(0.85, abs=0.02) and measured.exit_rate > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("fit", "limit_s"), [(fit_logistic, 1.0), (fit_threshold, 1.0), (fit_mlp, 10.0)])
def test_fitting_is_quick(fit: Callable[..., Predictor], limit_s: float) -> None:
    features, labels, _ = rows_of(1, 20_000)
    start = time.perf_counter()
    fit(features, labels)
    assert time.perf_counter() - start < limit_s
