"""Draft-verify steps of exact mode: by the formula, drawn at random, by hand and as planned."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import Part, model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import DraftRates, ExitRates, ExitStatistics, Statistics
from hetero_ee.planning.times.prediction import predicted_step, step_times
from hetero_ee.planning.times.steps import Step, StepTimes, exit_steps, hit_chance, sequence_step
from hetero_ee_profiles.reference import reference_profile

N_STEPS = 400_000
DRAFT_S, VERIFY_S = 0.3, (1.0, 1.1, 1.3, 1.4, 1.8, 2.0, 2.5, 3.1)


def verify_s(m: int) -> float:
    return VERIFY_S[m - 1]


# The formulas.


def drawn_exits(rates: ExitRates, draft_length: int, ahead_s: float, seed: int) -> Step:
    """Tokens exit or don't; drafts are right until the first wrong one; a step is shorter where all and the guess of
    its last token are right."""
    random = np.random.default_rng(seed)
    exits = random.random((N_STEPS, draft_length)) < rates.exit_rate
    right = random.random((N_STEPS, draft_length)) < np.where(exits, rates.precision, rates.refused_precision)
    n_exits = np.minimum(np.cumprod(exits, axis=1).sum(axis=1), draft_length - 1)
    n_right = np.cumprod(right, axis=1).sum(axis=1)
    is_hit = (n_right > n_exits) & (rates.refused_precision > 0)
    seconds = (n_exits + 1) * DRAFT_S + np.array(VERIFY_S)[n_exits] - ahead_s * is_hit
    tokens = np.minimum(n_right, n_exits) + 1
    return Step(float(seconds.mean()), float(tokens.mean()), float((n_exits + 1).mean()))


def drawn_sequence(acceptance: Sequence[float], m: int, seed: int) -> Step:
    random = np.random.default_rng(seed)
    right = random.random((N_STEPS, m - 1)) < np.array(acceptance)[: m - 1]
    tokens = 1 + np.cumprod(right, axis=1).sum(axis=1)
    return Step((m - 1) * DRAFT_S + verify_s(m), float(tokens.mean()), float(m))


def assert_close(found: Step, drawn: Step) -> None:
    assert found.seconds == pytest.approx(drawn.seconds, rel=1e-2)
    assert found.tokens == pytest.approx(drawn.tokens, rel=1e-2)
    assert found.batch == pytest.approx(drawn.batch, rel=1e-2)
    assert found.seconds_per_token == pytest.approx(drawn.seconds_per_token, rel=1e-2)


@pytest.mark.parametrize(
    "rates",
    [
        ExitRates(0.5, 0.9),
        ExitRates(0.9, 0.7),
        ExitRates(1.0, 0.95),
        ExitRates(0.75, 0.9, 0.5),
        ExitRates(1.0, 0.8, 0.1),
        ExitRates(0.2, 0.3, 0.6),
    ],
)
def test_exits_as_drawn(rates: ExitRates) -> None:
    steps = exit_steps(rates, 8, DRAFT_S, verify_s, ahead_s=0.25)
    assert len(steps) == 8
    for draft_length in (1, 2, 5, 8):
        assert_close(steps[draft_length - 1], drawn_exits(rates, draft_length, 0.25, seed=draft_length))


@pytest.mark.parametrize("acceptance", [(0.8,) * 8, (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0), (1.0,) * 8])
def test_sequences_as_drawn(acceptance: tuple[float, ...]) -> None:
    rates = DraftRates("drawn", acceptance, DRAFT_S)
    for m in (2, 4, 8):
        assert_close(sequence_step(m, rates.acceptance_at, DRAFT_S, verify_s), drawn_sequence(acceptance, m, seed=m))


@given(st.floats(0, 1), st.integers(1, 16))
def test_even_acceptance_is_a_geometric_sum(acceptance: float, m: int) -> None:
    found = sequence_step(m, lambda position: acceptance, 0.5, lambda m: float(m))
    assert found.tokens == pytest.approx(sum(acceptance**j for j in range(m)))
    assert found.seconds == pytest.approx(0.5 * (m - 1) + m)


def test_a_step_of_one_token_is_a_pass() -> None:
    assert sequence_step(1, lambda position: 0.5, 9.0, verify_s) == Step(1.0, 1.0, 1.0)
    assert exit_steps(ExitRates(0.7, 0.7), 1, DRAFT_S, verify_s) == [Step(DRAFT_S + 1.0, 1.0, 1.0)]


def test_a_step_by_hand() -> None:
    """Two tokens at most: 3 of 4 steps have both, of which 0.8 bring two."""
    two = exit_steps(ExitRates(0.75, 0.8), 2, 0.5, verify_s)[-1]
    assert two.seconds == pytest.approx(0.25 * (0.5 + 1.0) + 0.75 * (1.0 + 1.1))
    assert two.tokens == pytest.approx(0.25 + 0.75 * 1.8) and two.batch == 1.75


def test_a_hit_by_hand() -> None:
    rates = ExitRates(0.75, 0.8, 0.5)
    assert hit_chance(rates, 1, is_full=False) == 0.5
    assert hit_chance(rates, 3, is_full=False) == pytest.approx(0.8**2 * 0.5)
    assert hit_chance(rates, 3, is_full=True) == pytest.approx(0.8**2 * (0.75 * 0.8 + 0.25 * 0.5))
    assert hit_chance(ExitRates(0.75, 0.8), 3, is_full=True) == 0  # not known
    (alone,), (ahead,) = (exit_steps(rates, 1, 0.5, verify_s, ahead_s) for ahead_s in (0.0, 0.4))
    assert alone.seconds - ahead.seconds == pytest.approx(0.4 * (0.75 * 0.8 + 0.25 * 0.5))


@pytest.mark.parametrize("name", ["exit_rate", "precision", "refused_precision"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_rates_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(ExitRates(0.5, 0.5, 0.5), **{name: value})


@pytest.mark.parametrize("exit_layers", [(), (0,), (32,), (3, 2)])
def test_exit_layers_that_cannot_be(exit_layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="exit layers must ascend between 1 and 31"):
        ExitStatistics("drawn", 32, dict.fromkeys(exit_layers, ExitRates(0.5, 0.5)))


def test_rates_between_those_that_are_known() -> None:
    found = ExitStatistics("drawn", 32, {8: ExitRates(0.2, 0.5, 0.1), 16: ExitRates(0.6, 0.9, 0.3)})
    assert found.rates_at(7) == ExitRates(0.0, 0.0) and found.rates_at(8) == found.rates[8]
    assert found.rates_at(31) == found.rates[16]
    between = found.rates_at(10)
    shares = (between.exit_rate, between.precision, between.refused_precision)
    assert shares == pytest.approx((0.3, 0.6, 0.15))


# What drafts and verifications take.


class OneSecondLayers:
    """A layer takes 1 s and 0.1 s more for every other token, on the CPU cpu_factor times as long; the head 0.5 s, a
    transfer 0.01 s."""

    profile = SimpleNamespace(link=object())

    def __init__(self, cpu_factor: float) -> None:
        self._cpu_factor = cpu_factor

    def part_s(self, part: Part, placement: Placement, m: int, context_tokens: int) -> float:
        factor = self._cpu_factor if placement == "cpu" else 1.0
        return 0.5 * (part.name == "head") if part.layer is None else factor * (0.5 + 0.05 * (m - 1))

    def copy_s(
        self, part: Part, placement: Placement = Placement.STREAM, context_tokens: int = 0, *, beside_cpu: bool = False
    ) -> float:
        return 0.1

    def transfer_s(self, m: int) -> float:
        return 0.01

    def logits_transfer_s(self, m: int) -> float:
        return float(m)

    def exit_end_s(self, head: Part, placement: Placement, map_rank: int, *, is_partial: bool = False) -> float:
        return 0.5 + 0.001 * map_rank + 0.03


def times_of(layers: str, cpu_factor: float = 1.0) -> StepTimes:
    """Of four layers, a letter for each part; the head is on the GPU, and after three layers there is a map."""
    every, costs = model_parts(known_spec("tinyllama-1.1b"), "fp16"), OneSecondLayers(cpu_factor)
    names = {"g": Placement.GPU, "c": Placement.CPU, "s": Placement.STREAM}
    placements = [Placement.CPU, *(names[letter] for letter in layers.replace(" ", "")), Placement.GPU]
    parts: Any = [*every[:9], every[-1]]
    return StepTimes(costs, parts, placements, 64, 8, map_ranks={3: 16})  # type: ignore[arg-type]


def test_drafts_and_verifications_by_hand() -> None:
    found = times_of("gg gg cc cc")
    assert found.draft_s(1) == pytest.approx(1.01 + 0.51 + 0.03)  # to the GPU, and the drafted token back
    assert found.draft_s(3) == pytest.approx(
        3.02 + 0.52 + 0.03 + 0.016
    )  # there are two more transfers, to the CPU and to the head
    assert found.verify_s(2, 3) == pytest.approx(0.02 + 2.4 + 0.5 + 3.0)
    assert found.verify_s(0, 1) == pytest.approx(0.03 + 4.0 + 0.5 + 1.0)
    further_s = (found.verify_s(2, 8) - found.verify_s(2, 4)) / 4  # beyond the most tokens of a text, as far as those
    assert found.verify_s(2, 11) == pytest.approx(found.verify_s(2, 8) + 3 * further_s)


@pytest.mark.parametrize(
    ("layers", "exit_layer", "seconds"),
    [
        ("cc cc cc cc", 2, 0.0),
        ("gg gg cc cc", 2, 2.01),
        ("gg gg gg cc", 3, 1.01),  # three layers ahead would be waited for: one is left
        ("gg cc cc cc", 3, 1.01),
        ("gg cc gg cc", 1, 1.01),  # the waiting tokens pass two layers before
        ("gg ss cc cc", 2, 0.0),
    ],
)
def test_what_runs_ahead(layers: str, exit_layer: int, seconds: float) -> None:
    assert times_of(layers, cpu_factor=1.1).ahead_s(exit_layer) == pytest.approx(seconds)


# What is planned.

SPEC, PROFILE = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
PINNED = Limits(vram_budget_bytes=6 * 2**30, context_tokens=512, gpu_layers=16, mode="exact")


def statistics(refused_precision: float) -> Statistics:
    """Drafts at 10 are wrong."""
    rates = {10: ExitRates(0.0, 0.0), 16: ExitRates(0.8, 0.95, refused_precision)}
    return Statistics(ExitStatistics("drawn", 32, rates))


def test_tokens_that_begin_ahead_make_steps_shorter_where_guesses_are_known() -> None:
    """Layers before the exit layer on the GPU, the later ones on the CPU."""
    found = [plan(SPEC, PROFILE, PINNED, statistics(refused)).prediction for refused in (0.0, 0.5)]
    assert found[1].generated_tokens_per_s > 1.01 * found[0].generated_tokens_per_s
    made = plan(SPEC, PROFILE, PINNED, statistics(0.5))
    assert step_times(SPEC, PROFILE, made).layers_ahead(16) == 16
    on_cpu = plan(SPEC, PROFILE, replace(PINNED, gpu_layers=0), statistics(0.5))
    assert step_times(SPEC, PROFILE, on_cpu).layers_ahead(16) == 0


def test_a_step_is_predicted_as_it_was_planned() -> None:
    known = statistics(0.5)
    made = plan(SPEC, PROFILE, PINNED, known)
    found = predicted_step(SPEC, PROFILE, made, known, 256)
    assert found is not None and 1 / found.seconds_per_token == pytest.approx(made.prediction.generated_tokens_per_s)
    assert predicted_step(SPEC, PROFILE, made, Statistics(), 256) is None
