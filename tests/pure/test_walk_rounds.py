"""Rounds whose rows may exit at levels on the way, and rows that begin ahead: by hand, as drawn, and as planned."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.explanation import any_of, explained
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.schedule import WORTH_IT, Chain
from hetero_ee.planning.statistics import ExitLayerRates, ExitStatistics, Statistics
from hetero_ee.planning.times.overlap import Overlap
from hetero_ee.planning.times.round_costs import predicted_round, round_costs
from hetero_ee.planning.times.rounds import (
    ExitRates,
    LevelWalk,
    Round,
    WalkCosts,
    WalkRates,
    expected_rounds,
    guess_chance,
    walk_rounds,
)
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import reference_profile

N_ROUNDS = 200_000
COSTS = WalkCosts(exit_s=0.2, last_s=lambda m: 0.5 + 0.01 * m, refused_s=0.05, head_s=0.02)


def verify_s(m: int) -> float:
    return 1.0 + 0.1 * m


# The formula.


def test_a_round_by_hand() -> None:
    """Two rows at most: 3 of 4 rounds have both, of which 0.8 bring two tokens."""
    walk = WalkRates(0.75, 0.8, 0.0, 4.0, 2.0)
    one, two = walk_rounds(walk, 2, COSTS, verify_s)
    assert one.seconds == pytest.approx(0.51 + 0.02 + 1.1) and (one.tokens, one.rows) == (1, 1)
    refused = 0.51 + 0.05 + 1.1  # one row that does not exit
    full = 0.2 + 0.52 + 0.02 + 1.2  # an exit, and the row behind it, whom nobody asks
    assert two.seconds == pytest.approx(0.25 * refused + 0.75 * full)
    assert two.tokens == pytest.approx(0.25 + 0.75 * 1.8) and two.rows == 1.75


def test_a_guess_by_hand() -> None:
    rates = ExitRates(0.75, 0.8, 0.5)
    assert guess_chance(rates, 1, is_full=False) == 0.5
    assert guess_chance(rates, 3, is_full=False) == pytest.approx(0.8**2 * 0.5)
    assert guess_chance(rates, 3, is_full=True) == pytest.approx(0.8**2 * (0.75 * 0.8 + 0.25 * 0.5))
    assert guess_chance(ExitRates(0.75, 0.8), 3, is_full=True) == 0  # not known
    (alone,), (ahead,) = (expected_rounds(rates, 1, 0.5, verify_s, ahead_s) for ahead_s in (0.0, 0.4))
    assert alone.seconds - ahead.seconds == pytest.approx(0.4 * (0.75 * 0.8 + 0.25 * 0.5))


def drawn(walk: WalkRates, most: int, ahead_s: float) -> Round:
    random = np.random.default_rng(most)
    seconds = tokens = rows = 0.0
    exits = random.random((N_ROUNDS, most)) < walk.exit_rate
    right = random.random((N_ROUNDS, most)) < np.where(exits, walk.precision, walk.refused_precision)
    n_exits = np.minimum(np.cumprod(exits, axis=1).sum(axis=1), most - 1)
    n_right = np.cumprod(right, axis=1).sum(axis=1)
    n_rows = n_exits + 1
    is_full, is_hit = n_rows == most, n_right >= n_rows
    judging_s = np.where(is_full, COSTS.head_s, COSTS.refused_s)
    seconds = n_exits * COSTS.exit_s + 0.5 + 0.01 * n_rows + judging_s + 1 + 0.1 * n_rows - ahead_s * is_hit
    tokens, rows = np.minimum(n_right, n_exits) + 1, n_rows
    return Round(*(float(each.mean()) for each in (seconds, tokens, rows)))


@pytest.mark.parametrize("most", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "walk",
    [WalkRates(0.75, 0.9, 0.5, 4.0, 2.0), WalkRates(1.0, 0.8, 0.1, 4.0, 1.5), WalkRates(0.2, 0.3, 0.6, 1.0, 2.9)],
)
def test_rounds_as_drawn(walk: WalkRates, most: int) -> None:
    found, expected = walk_rounds(walk, most, COSTS, verify_s, ahead_s=0.3)[-1], drawn(walk, most, 0.3)
    for name in ("seconds", "tokens", "rows"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-2)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 8))
def test_exits_at_the_boundary_alone_are_rounds_without_levels(p: float, q: float, most: int) -> None:
    alone = expected_rounds(ExitRates(p, q), most, 0.7, verify_s)
    costs = WalkCosts(exit_s=0.7, last_s=lambda m: 0.6, refused_s=0.1, head_s=0.1)
    for found, expected in zip(walk_rounds(WalkRates(p, q, 0, 8, 1), most, costs, verify_s), alone, strict=True):
        assert found.seconds == pytest.approx(expected.seconds) and found.tokens == expected.tokens


@pytest.mark.parametrize("name", ["exit_rate", "precision", "refused_precision", "mean_exit_depth", "n_evaluated"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_rates_that_cannot_be(name: str, value: float) -> None:
    good = WalkRates(0.5, 0.5, 0.5, 4.0, 2.0)
    with pytest.raises(ValueError, match=name):
        replace(good, **{name: value})
    if name != "mean_exit_depth" and name != "n_evaluated":
        with pytest.raises(ValueError, match=name):
            replace(good, **{name: 1.1})


# What a row costs on its way.

N_LAYERS = 4
# Each layer takes 1 s and 0.1 s for every other row; the head 0.5 s, a way to it 0.01 s.
SUMS = {m: [0.0, 0.0, *np.cumsum([0.5 + 0.05 * (m - 1)] * 2 * N_LAYERS), 4.5 + m] for m in (1, 2, 3)}
# The CPU would take as long as the GPU: host_s counts the layers from a part on, and no head.
CHAIN = Chain(SUMS, [0.51] * 10, [0.01] * 10, host_s=[4.0, *(4.0 - 0.5 * i for i in range(9)), 0.0])


def a_walk(*shares: float, places: tuple[int, ...]) -> LevelWalk:
    """Chances to exit at these places, the last of them the exit layer."""
    return LevelWalk(WalkRates(sum(shares), 0.9, 0.0, 1.0, 1.0), places, shares)


def test_costs_of_a_walk_by_hand() -> None:
    costs = CHAIN.walk_costs(a_walk(0.25, 0.25, 0.5, places=(1, 2, 3)))
    judged = (0.51, 0.51 + 0.01, 0.51 + 0.01 + 0.51)  # whole head, its rows of the candidates, whole head
    assert costs.exit_s == pytest.approx(0.25 * (1 + judged[0]) + 0.25 * (2 + judged[1]) + 0.5 * (3 + judged[2]))
    assert costs.refused_s == pytest.approx(judged[2]) and costs.head_s == 0.51
    # A row more takes 0.1 s of a layer; of two rows that have exited, a quarter of each waits before layer 1, and half
    # before layer 2.
    assert costs.last_s(1) == pytest.approx(3.0)
    assert costs.last_s(3) == pytest.approx(3.0 + 2 * 0.1 * (0.25 + 0.5))
    some = CHAIN.walk_costs(a_walk(0.1, 0.3, places=(2, 3)))  # of those that exit
    assert some.exit_s == pytest.approx(0.25 * (2 + 0.51) + 0.75 * (3 + 1.02))
    assert CHAIN.walk_costs(a_walk(0.0, 0.0, places=(2, 3))).refused_s == pytest.approx(1.02)


def test_what_a_row_ahead_spares_by_hand() -> None:
    ahead = replace(CHAIN, overlap=Overlap(2, 2))  # two layers, 2 s
    assert ahead.walk_ahead_s(a_walk(0.25, 0.25, 0.25, places=(1, 2, 2))) == pytest.approx(0.25 * 1 + 0.75 * 2)


def test_how_many_are_judged_tells_where_they_exit() -> None:
    """Of 100 rows 40 exit at 4, then 20 at 7, then 10 at the exit layer, 9; of those that have not at 4, 30 at 7 where
    that is the exit layer."""
    at_7 = WalkRates(0.7, 0.9, 0.0, 5.0, n_evaluated=1 + 0.6)
    at_9 = WalkRates(0.7, 0.9, 0.0, 5.6, n_evaluated=1 + 0.6 + 0.4)
    entries = (ExitLayerRates(4, ALONE), ExitLayerRates(7, ALONE, at_7), ExitLayerRates(9, ALONE, at_9))
    known = ExitStatistics("drawn", 12, entries, schedule=(4, 7))
    found = known.level_walk(9)
    assert found is not None and (found.places, found.levels) == ((4, 7, 9), (4, 7))
    assert found.exit_shares == pytest.approx((0.4, 0.2, 0.1)) and found.rates == at_9
    earlier = known.level_walk(7)
    assert earlier is not None and earlier.exit_shares == pytest.approx((0.4, 0.3))
    assert known.level_walk(4) is None and known.level_walk(10) is None
    assert replace(known, exit_layers=(entries[0], entries[2])).level_walk(9) is None  # what exits at 7 is not known
    noisy = replace(at_7, n_evaluated=1.2)  # more are said to exit at 4 than do at all
    skewed = replace(known, exit_layers=(entries[0], ExitLayerRates(7, ALONE, noisy))).level_walk(7)
    assert skewed is not None and skewed.exit_shares == pytest.approx((0.7, 0.0))
    twice = replace(at_7, n_evaluated=2.0, exit_rate=0.0)
    assert replace(known, exit_layers=(entries[0], ExitLayerRates(7, ALONE, twice))).level_walk(7) is None


@pytest.mark.parametrize(
    ("found", "exit_layer", "seconds"),
    [
        (None, 2, 0.0),
        (Overlap(2, 2), 2, 2.0),
        (Overlap(3, 3), 3, 1.0),  # three layers ahead would be waited for: one is left
        (Overlap(1, 1), 3, 1.0),
        (Overlap(1, 3), 1, 1.0),  # the waiting rows pass two layers of the GPU's before
    ],
)
def test_what_runs_ahead(found: Overlap | None, exit_layer: int, seconds: float) -> None:
    assert replace(CHAIN, overlap=found).ahead_s(exit_layer) == pytest.approx(seconds)
    assert replace(CHAIN, overlap=found, has_streams=True).ahead_s(exit_layer) == 0


# What is planned.

SPEC, PROFILE = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
LIMITS = Limits(vram_budget_bytes=3 * 2**30, context_tokens=512)
ALONE = ExitRates(0.8, 0.95)


def statistics(*shares: float, **changes: Any) -> Statistics:
    """Chances to exit at 6, 10 and exit layer 16; no shares: walks were not measured. Drafts at 10 alone are wrong."""
    walks: list[WalkRates | None] = [None, None]
    if shares:
        n_evaluated = 2 - shares[0], 3 - 2 * shares[0] - shares[1]
        walks = [WalkRates(0.8, q, 0.0, 6.0, n) for q, n in zip((0.0, 0.95), n_evaluated, strict=True)]
    alone = {"rates": ALONE} | changes
    entries = (ExitLayerRates(10, ExitRates(0.0, 0.0), walks[0]), ExitLayerRates(16, walk=walks[1], **alone))
    return Statistics(ExitStatistics("drawn", 32, entries, schedule=(6, 10, 20)))


def planned(known: Statistics) -> Plan:
    return plan(SPEC, PROFILE, LIMITS, known)


def test_levels_are_planned_where_they_are_faster() -> None:
    without, found = planned(statistics()), planned(statistics(0.8, 0.0, 0.0))
    assert without.exit_levels == () and (found.exit_levels, found.exit_layer) == ((6, 10), 16)
    assert planned(statistics(0.0, 0.0, 0.8)).exit_levels == ()
    rates = [made.prediction.generated_tokens_per_s for made in (without, found)]
    assert rates[1] > rates[0] / WORTH_IT
    assert "drafts exit after layer 6, 10 or 16, " in explained(found).replace("\N{NO-BREAK SPACE}", " ")
    assert from_json(Plan, to_json(found)) == found and found.sha256 != without.sha256


def test_a_gain_of_less_than_the_predictions_err_by_is_left() -> None:
    """The more rows exit early, the more there is to gain."""
    made = [planned(statistics(early / 20, 0.0, 0.8 - early / 20)) for early in range(17)]
    found = [bool(each.exit_levels) for each in made]
    assert found == sorted(found) and 0 < sum(found) < len(found) - 1
    first = made[found.index(True)].prediction.generated_tokens_per_s
    assert first > planned(statistics()).prediction.generated_tokens_per_s / WORTH_IT


def test_there_are_no_levels_where_weights_are_streamed() -> None:
    """What copies that run ahead take is known of whole ways to the exit layer alone."""
    streamed = replace(LIMITS, overrides=((r"layers\.(28|29|30|31)\..*", "stream"),), mode="exact")
    made = plan(SPEC, PROFILE, streamed, statistics(0.8, 0.0, 0.0))
    assert (made.drafts, made.exit_levels) == ("exit", ())


def test_a_round_is_predicted_with_the_plans_levels() -> None:
    known = statistics(0.8, 0.0, 0.0)
    found = planned(known)
    with_levels = predicted_round(SPEC, PROFILE, found, known, 256)
    without = predicted_round(SPEC, PROFILE, replace(found, exit_levels=()), known, 256)
    other = predicted_round(SPEC, PROFILE, replace(found, exit_levels=(3,)), known, 256)
    assert with_levels is not None and without is not None
    assert with_levels.seconds < without.seconds and other == without  # none but those that were measured
    assert 1 / with_levels.seconds_per_token == pytest.approx(found.prediction.generated_tokens_per_s)
    walk = known.exits.level_walk(16) if known.exits else None
    draft_s = [round_costs(SPEC, PROFILE, found, 16, each).draft_s for each in (None, walk)]
    assert draft_s[1] < 0.6 * draft_s[0]


def test_rows_that_begin_ahead_make_rounds_shorter_where_guesses_are_known() -> None:
    """Layers before the exit layer on the GPU, those behind on the CPU."""
    known = statistics(rates=replace(ALONE, refused_precision=0.5))
    pinned = replace(LIMITS, gpu_layers=16, vram_budget_bytes=6 * 2**30, mode="exact")
    found = [plan(SPEC, PROFILE, pinned, each).prediction for each in (statistics(), known)]
    assert found[1].generated_tokens_per_s > 1.01 * found[0].generated_tokens_per_s
    made = plan(SPEC, PROFILE, pinned, known)
    assert round_costs(SPEC, PROFILE, made, 16).layers_ahead == 16
    on_cpu = plan(SPEC, PROFILE, replace(pinned, gpu_layers=0), known)
    assert round_costs(SPEC, PROFILE, on_cpu, 16).layers_ahead == 0


def test_layers_in_words() -> None:
    assert [any_of(layers) for layers in ((4,), (4, 7), (3, 4, 7))] == ["4", "4 or 7", "3, 4 or 7"]


@pytest.mark.parametrize("schedule", [(0,), (32,), (3, 2), (2, 2)])
def test_schedules_that_cannot_be(schedule: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the schedule's exit layers must ascend between 1 and 31"):
        ExitStatistics("drawn", 32, (ExitLayerRates(16, ALONE),), schedule=schedule)
