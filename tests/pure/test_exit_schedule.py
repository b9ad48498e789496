"""The layers worth a predictor against every choice of them, and the memory of recent exits."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.speculation.exits.schedule import (
    ExitCosts,
    ExitSchedule,
    RecentExits,
    choose_exit_layers,
    exit_histogram,
)

SHARES = st.integers(2, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 5), min_size=n, max_size=n),
        st.lists(st.integers(0, 9), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 0.1, 1.0, 4.0]), min_size=n, max_size=n),
        st.integers(0, 10),
        st.sampled_from([0.0, 0.5, 6.0]),
    )
)
Shares = tuple[list[int], list[int], list[float], int, float]


def simulated_saving(costs: ExitCosts, chosen: tuple[int, ...]) -> float:
    """Each row walks the layers: it pays for every predictor that it meets, at the first for the whole head as well,
    and stops at the first it may exit at."""
    total = 0.0
    firsts = [*enumerate(costs.histogram), (costs.n_layers, 1 - sum(costs.histogram))]
    for first, share in firsts:
        for exit_layer in sorted(chosen):
            total -= share * (costs.predictor[exit_layer] + (costs.first if exit_layer == min(chosen) else 0.0))
            if exit_layer >= first:
                total += share * sum(costs.layer[exit_layer:])
                break
    return total


def costs_of(shares: Shares) -> ExitCosts:
    counts, layers, predictors, n_deep, first = shares
    n = max(1, sum(counts) + n_deep)
    return ExitCosts(tuple(count / n for count in counts), tuple(map(float, layers)), tuple(predictors), first)


@given(shares=SHARES, n_most=st.integers(0, 7), first=st.one_of(st.none(), st.integers(1, 6)))
@settings(max_examples=200, deadline=None)
def test_no_other_choice_saves_more(shares: Shares, n_most: int, first: int | None) -> None:
    costs = costs_of(shares)
    choices = [c for n in range(n_most + 1) for c in combinations(range(1, costs.n_layers), n)]
    if first is not None:
        choices = [choice for choice in choices if choice[:1] in ((), (first,))]
    found = choose_exit_layers(costs, n_most, first)
    assert found.exit_layers in choices
    assert found.saved == pytest.approx(max(simulated_saving(costs, choice) for choice in choices), abs=1e-9)
    assert found.saved == pytest.approx(simulated_saving(costs, found.exit_layers), abs=1e-9)
    for exit_layer, worth in zip(found.exit_layers, found.worth, strict=True):
        others = tuple(other for other in found.exit_layers if other != exit_layer)
        assert worth == pytest.approx(found.saved - simulated_saving(costs, others), abs=1e-9)
        assert first is not None or worth >= -1e-9


@given(shares=SHARES, chosen=st.sets(st.integers(1, 6)))
@settings(max_examples=100, deadline=None)
def test_the_saving_of_any_choice(shares: Shares, chosen: set[int]) -> None:
    costs = costs_of(shares)
    places = tuple(sorted(exit_layer for exit_layer in chosen if exit_layer < costs.n_layers))
    assert costs.saved(places) == pytest.approx(simulated_saving(costs, places), abs=1e-9)


def test_places_where_many_exit_are_chosen_and_dear_predictors_are_not() -> None:
    histogram = (0, 0, 0.3, 0, 0, 0.01, 0, 0.3)
    cheap = ExitCosts(histogram, (1.0,) * 8, (0.05,) * 8)
    assert choose_exit_layers(cheap, 8).exit_layers == (2, 7)
    assert choose_exit_layers(cheap, 1).exit_layers == (2,)
    assert choose_exit_layers(ExitCosts(histogram, (1.0,) * 8, (3.0,) * 8), 8).exit_layers == ()


def test_many_layers_take_no_time() -> None:
    costs = ExitCosts((0.012,) * 80, (1.0,) * 80, (0.05,) * 80)
    found = choose_exit_layers(costs, 80)
    assert 10 < len(found.exit_layers) < 80 and found.saved > 0


@pytest.mark.parametrize(
    "parts", [((0.5, 0.6), (1, 1), (1, 1)), ((-0.1, 0), (1, 1), (1, 1)), ((0.1,), (1, 1), (1, 1)), ((), (), ())]
)
def test_costs_that_do_not_fit_together_are_refused(parts: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError):
        ExitCosts(*parts)


def test_a_row_can_exit_once_it_agrees_for_good() -> None:
    agrees = np.array(
        [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 0]],
        bool,
    )
    before = agrees.copy()
    assert exit_histogram(agrees) == (0.0, 0.2, 0.2, 0.2)
    np.testing.assert_array_equal(agrees, before)
    assert exit_histogram(np.zeros((0, 3), bool)) == (0.0, 0.0, 0.0)


def expected_active(chosen: set[int], exits: list[int], n_layers: int) -> tuple[int, ...]:
    near = {exit + offset for exit in exits[-5:] for offset in range(-2, 3)}
    return tuple(exit_layer for exit_layer in range(1, n_layers) if exit_layer in chosen | near)


@given(
    chosen=st.sets(st.integers(1, 11)),
    steps=st.lists(st.one_of(st.integers(1, 12), st.floats(0, 1)), max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_the_last_five_exits_and_undone_ones(chosen: set[int], steps: list[float]) -> None:
    """A whole number is an exit, a fraction goes back to that share of them."""
    recent, exits = RecentExits(chosen, 12), list[int]()
    for step in steps:
        if isinstance(step, int):
            recent.append(step)
            exits.append(step)
        else:
            del exits[int(step * len(exits)) :]
            recent.truncate(len(exits))
        assert len(recent) == len(exits)
        assert recent.active() == expected_active(chosen, exits, 12)
        assert [b for b in range(12) if recent.is_active(b)] == list(recent.active())


def test_a_new_sequence_knows_only_what_was_chosen() -> None:
    assert RecentExits([3, 9], 12).active() == (3, 9)


def test_boundaries_beyond_the_model_are_refused() -> None:
    for chosen in ([0], [12]):
        with pytest.raises(ValueError, match="model with 12 layers"):
            RecentExits(chosen, 12)
    recent = RecentExits([], 12)
    for exit_layer in (0, 13, -1):
        with pytest.raises(ValueError, match="model with 12 layers"):
            recent.append(exit_layer)
    assert len(recent) == 0 and recent.active() == ()


@pytest.mark.parametrize(
    ("exit_layers", "worth"), [((3, 3), (1.0, 1.0)), ((4, 2), (1.0, 1.0)), ((0,), (1.0,)), ((2,), ())]
)
def test_a_schedule_that_cannot_be_is_refused(exit_layers: tuple[int, ...], worth: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="schedule"):
        ExitSchedule(exit_layers, worth, 1.0)
