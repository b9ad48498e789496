"""Walks over several exit layers, against rows judged one by one as the definition says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.calibration.predictor_quality import NO_EXIT
from hetero_ee.calibration.walks import Walks, walks
from hetero_ee.speculation.exits.calibration import FittedExitLayer
from hetero_ee.speculation.exits.features import exit_features
from hetero_ee.speculation.exits.predictors import LogisticPredictor, ThresholdPredictor
from hetero_ee.speculation.exits.sliced_logits import SlicedLogits
from tests.pure.test_sliced_logits import some_logits


def logistic(seed: int) -> LogisticPredictor:
    random = np.random.default_rng(seed)
    weights = random.normal(size=12).astype(np.float32)
    return LogisticPredictor(np.zeros(12, np.float32), np.ones(12, np.float32), weights, np.zeros(1, np.float32))


def some_fits(n_exit_layers: int, seed: int, without_sliced: set[int]) -> list[FittedExitLayer]:
    """Predictors of their own for both contexts, so that a mixed-up one is seen."""
    fits = []
    for exit_layer in range(1, n_exit_layers + 1):
        has_sliced = exit_layer > 1 and exit_layer not in without_sliced
        sliced = logistic(1000 + 100 * seed + exit_layer) if has_sliced else None
        whole = logistic(100 * seed + exit_layer)
        fits.append(FittedExitLayer(exit_layer, None, whole, 0.8, sliced, 0.7 if has_sliced else NO_EXIT))
    return fits


def walk_of_row(
    fits: list[FittedExitLayer], levels: list[int], exit_layer: int, sliced: SlicedLogits, row: int
) -> tuple[bool, int, bool, int]:
    """(exits, depth, is right, evaluated) of one token that walks to `exit_layer`."""
    first, n_evaluated = None, 0
    softmax = np.zeros((1, 4), np.float32)
    for level in levels:
        predictor = fits[level - 1].predictor if first is None else fits[level - 1].sliced_predictor
        if level >= exit_layer or predictor is None:
            continue
        threshold = fits[level - 1].threshold if first is None else fits[level - 1].sliced_threshold
        first = first or level
        logits = sliced.at(first, level)[row : row + 1]
        n_evaluated += 1
        if predictor.probability(exit_features(logits, softmax))[0] >= threshold:
            return True, level, int(logits[0].argmax()) == sliced.rank[first - 1, row], n_evaluated
    logits = sliced.at(exit_layer, exit_layer)[row : row + 1]
    chance = fits[exit_layer - 1].predictor.probability(exit_features(logits, np.zeros((1, 4), np.float32)))[0]
    is_right = int(logits[0].argmax()) == sliced.rank[exit_layer - 1, row]
    return bool(chance >= fits[exit_layer - 1].threshold), exit_layer, is_right, n_evaluated + 1


@given(
    n_exit_layers=st.integers(1, 6),
    levels=st.sets(st.integers(1, 6)),
    without_sliced=st.sets(st.integers(1, 6), max_size=2),
    seed=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_a_walk_is_that_of_each_row_by_itself(
    n_exit_layers: int, levels: set[int], without_sliced: set[int], seed: int
) -> None:
    fits, sliced = some_fits(n_exit_layers, seed, without_sliced), some_logits(n_exit_layers, 12, seed)
    places = sorted(level for level in levels if level <= n_exit_layers)
    found = walks(fits, places, sliced)
    for exit_layer in range(1, n_exit_layers + 1):
        for row in range(12):
            expected = walk_of_row(fits, places, exit_layer, sliced, row)
            at = (exit_layer - 1, row)
            assert (found.is_exit[at], found.is_right[at], found.n_evaluated[at]) == (
                expected[0],
                expected[2],
                expected[3],
            )
            assert not expected[0] or found.depth[at] == expected[1]


def test_without_levels_each_boundary_stands_alone() -> None:
    fits, sliced = some_fits(4, 1, set()), some_logits(4, 300)
    for exit_layer, metrics in enumerate(walks(fits, (), sliced).metrics(), start=1):
        opens = fits[exit_layer - 1].opens(sliced.features(exit_layer, exit_layer, None), is_sliced=False)
        right = sliced.is_right(exit_layer, exit_layer)
        assert 0 < metrics.exit_rate < 1 and metrics.exit_rate == pytest.approx(opens.mean())
        assert metrics.precision == pytest.approx(right[opens].mean())
        assert metrics.refused_precision == pytest.approx(right[~opens].mean())
        assert (metrics.mean_exit_depth, metrics.n_evaluated) == (exit_layer, 1)


def test_figures_of_a_walk_counted_by_hand() -> None:
    """Boundary 3 of three tokens: one exits rightly at level 1, one wrongly at 3 itself, one not at all."""
    found = Walks(
        np.array([[1, 1, 1], [2, 2, 2], [1, 3, 3]]),
        np.array([[False] * 3, [False] * 3, [True, True, False]]),
        np.array([[False] * 3, [True] * 3, [True, False, True]]),
        np.array([[1, 1, 1], [1, 1, 1], [1, 2, 2]]),
    )
    metrics = Walks.joined([found, found]).metrics()[2]
    assert metrics == found.metrics()[2]
    assert (metrics.exit_rate, metrics.precision, metrics.refused_precision) == (2 / 3, 1 / 2, 1)
    assert (metrics.mean_exit_depth, metrics.n_evaluated) == (2, 5 / 3)
    assert found.metrics()[0].mean_exit_depth == 0


def test_a_gate_that_never_opens_leaves_the_last_boundary() -> None:
    fits = [replace(each, threshold=NO_EXIT, sliced_threshold=NO_EXIT) for each in some_fits(3, 2, set())]
    fits[2] = replace(fits[2], predictor=ThresholdPredictor(4, 1e-9, 1e-9), threshold=0.0)
    metrics = walks(fits, (1, 2), some_logits(3, 40)).metrics()[2]
    assert (metrics.exit_rate, metrics.mean_exit_depth, metrics.n_evaluated) == (1.0, 3.0, 3.0)
