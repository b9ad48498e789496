"""Early-exit modes by the planner: how often layers are passed, what that takes and moves, and where parts go."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.options.engine import EARLY_EXIT_MODES
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.reports.explanation import explained
from hetero_ee.planning.reports.what_if import Request, what_if
from hetero_ee.planning.request import PlanRequest
from hetero_ee.planning.statistics import DepthStatistics, ExitRates, Statistics
from hetero_ee.planning.times.costs import Costs
from hetero_ee.planning.times.early_exits import Passes, early_step
from hetero_ee.planning.times.lanes import pass_time
from hetero_ee.planning.times.prediction import predicted_step, predicted_text_s
from hetero_ee.planning.times.steps import JUDGEMENT_S, StepTimes, exit_steps
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee.runtime.drafted import DraftEnd, DraftNoise
from hetero_ee.runtime.replans import Replans
from hetero_ee.speculation.pending import PendingToken, advance
from hetero_ee_profiles.hardware import MEASURED
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP, dummy
from tests.published_exits import published_depths, published_statistics

SPEC, PROFILE, CONTEXT = known_spec("llama-2-7b"), reference_profile(LAPTOP), 512
N_TOKENS = 200_000
HALF: dict[str, Any] = {"gpu_layers": 16, "context_tokens": 1024}
GPU_HALF = [Placement.GPU] * (1 + 2 * 16) + [Placement.CPU] * (2 * 16) + [Placement.GPU]


def of_shares(shares: dict[int, float], **changes: Any) -> DepthStatistics:
    return DepthStatistics("specee", "made up", tuple(shares), tuple(shares.values()), **changes)


def times_of(placements: list[str], **changes: Any) -> StepTimes:
    return StepTimes(Costs(SPEC, PROFILE), model_parts(SPEC, "fp16"), placements, CONTEXT, 16, **changes)


@st.composite
def depth_statistics(draw: st.DrawFn) -> DepthStatistics:
    layers = sorted(draw(st.sets(st.integers(1, 31), min_size=1, max_size=4)))
    parts = [draw(st.floats(0, 1)) for _ in range(len(layers) + 1)]
    return of_shares({layer: part / max(1e-9, sum(parts)) for layer, part in zip(layers, parts, strict=False)})


# How often.


def drawn_passes(known: DepthStatistics, most: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Token by token: who waits passes with the next one that goes deeper; where `most` would, that one goes on."""
    found = [np.zeros(most) for _ in range(len(known.exit_layers) + 1)]
    chances = [*known.shares, max(0.0, 1 - sum(known.shares))]
    exits = np.random.default_rng(seed).choice(len(chances), N_TOKENS, p=np.array(chances) / sum(chances))
    waiting = [0] * len(found)  # tokens that lack what is behind so many exit layers
    since_all = 0
    for exited in exits.tolist():
        since_all += 1
        last = len(known.shares) if since_all == most else exited
        for behind in range(len(found)):
            waiting[behind] += 1
            if behind <= last:
                found[behind][waiting[behind] - 1] += 1
                waiting[behind] = 0
        since_all = 0 if last == len(known.shares) else since_all
    return [each / N_TOKENS for each in found]


@settings(max_examples=6)
@given(depth_statistics(), st.integers(2, 6), st.integers(0, 99))
def test_passes_are_those_of_drawn_texts(known: DepthStatistics, most: int, seed: int) -> None:
    for found, drawn in zip(Passes.of(known, most).batches, drawn_passes(known, most, seed), strict=True):
        assert found == pytest.approx(drawn, abs=6e-3)


@given(depth_statistics(), st.integers(1, 16))
def test_every_token_passes_every_layer_once_where_it_waits(known: DepthStatistics, most: int) -> None:
    found = Passes.of(known, most)
    for batch in found.batches:
        assert sum(m * n_passes for m, n_passes in enumerate(batch, 1)) == pytest.approx(1)
    assert found.chances == sorted(found.chances, reverse=True) and found.chances[0] == pytest.approx(1)
    assert 1 / most <= found.chances[-1] * (1 + 1e-9)


def test_layers_behind_an_exit_layer() -> None:
    found = Passes.of(of_shares({2: 0.5, 4: 0.25}), 64)
    assert [sum(found.behind(layer)) for layer in (0, 1, 2, 3, 4, 9)] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25])
    assert found.mean_depth(8) == pytest.approx(2 + 2 * 0.5 + 4 * 0.25)


# What it takes.


@given(st.integers(1, 31), st.floats(0, 1), st.integers(1, 16))
def test_one_exit_layer_is_a_draft_verify_step_that_is_always_right(layer: int, share: float, most: int) -> None:
    times = times_of(GPU_HALF)
    step = exit_steps(ExitRates(share, 1.0), most, times.draft_s(layer), lambda m: times.verify_s(layer, m))[-1]
    found = early_step(times, of_shares({layer: share}), most)
    assert (found.seconds, found.tokens, found.batch) == pytest.approx((step.seconds, step.tokens, step.batch))


@given(depth_statistics(), st.integers(2, 16), st.booleans())
def test_where_nothing_exits_full_modes_time_and_judging(known: DepthStatistics, most: int, is_partial: bool) -> None:
    known, times = replace(known, shares=(0.0,) * len(known.shares), is_partial=is_partial), times_of(GPU_HALF)
    full_s = pass_time(Costs(SPEC, PROFILE), model_parts(SPEC, "fp16"), GPU_HALF, 1, CONTEXT).seconds
    judging_s = sum(
        times.exit_head_s(layer, is_partial=is_partial and i > 0) for i, layer in enumerate(known.exit_layers)
    )
    found = early_step(times, known, most)
    assert found.seconds == pytest.approx(full_s + judging_s, rel=1e-12)
    assert (found.tokens, found.batch) == (1, 1)


@given(st.integers(1, 31), st.integers(2, 16))
def test_where_all_exit_the_first_layers_time(layer: int, most: int) -> None:
    times, known = times_of(GPU_HALF), of_shares({layer: 1.0})
    first_s = times.layers_s(layer) + times.exit_head_s(layer)
    caught_up_s = times.verify_s(layer, most) / most
    assert early_step(times, known, most).seconds_per_token == pytest.approx(first_s + caught_up_s)


def test_what_candidates_and_a_draft_head_cost() -> None:
    times, shares = times_of(GPU_HALF), {8: 0.25, 16: 0.5}
    _, second, beyond = Passes.of(of_shares(shares), 4).chances
    whole, few = (early_step(times, of_shares(shares, is_partial=each), 4).seconds_per_token for each in (False, True))
    saved_s = times.exit_head_s(16) - times.exit_head_s(16, is_partial=True)
    assert few == pytest.approx(whole - second * saved_s + (second - beyond) * times.exit_head_s(16))
    assert saved_s > 0
    drafted = of_shares(shares, is_partial=True, is_drafted=True, judged=(0.5, 1.0))
    least = early_step(times, drafted, 4, draft_s=1.0).seconds_per_token
    first_s = 0.5 * times.exit_head_s(8, is_partial=True) + (1 - second) * times.exit_head_s(8)
    assert least == pytest.approx(few + 1 - times.exit_head_s(8) + first_s)


def test_on_a_measured_machine_judgements_cost_more_than_their_products() -> None:
    judging, plain = of_shares({8: 0.5}, is_partial=True, is_drafted=True, judged=(0.5,)), times_of(GPU_HALF)
    measured = StepTimes(Costs(SPEC, replace(PROFILE, kind=MEASURED)), model_parts(SPEC, "fp16"), GPU_HALF, CONTEXT, 16)
    found, expected = (early_step(times, judging, 4).seconds_per_token for times in (measured, plain))
    assert found == pytest.approx(expected + 0.5 * JUDGEMENT_S)


# What is planned.


def test_the_split_moves_and_layers_hardly_needed_go_to_the_slowest_place() -> None:
    """With room for a bit more than half of the weights: attention's keys and values no longer keep its FFNs away."""
    known = Statistics(depths=(of_shares({20: 0.95}),))
    limits = Limits(vram_budget_bytes=3 * 2**30, context_tokens=2048)
    full, early = (plan(SPEC, PROFILE, replace(limits, mode=mode), known) for mode in ("full", "specee"))
    n_full, n_early = (each.decode_placements[1:41].count("gpu") for each in (full, early))
    assert n_early > n_full and set(early.decode_placements[41:-1]) == {"cpu"}
    assert early.prediction.generated_tokens_per_s > 1.5 * full.prediction.generated_tokens_per_s


def test_a_certificate_for_each_exit_layer_is_chosen_from_by_speed() -> None:
    depths = tuple(DepthStatistics("certified", "", (n,), (share,)) for n, share in ((8, 0.01), (17, 0.6), (30, 0.9)))
    made = plan(SPEC, PROFILE, Limits(mode="certified", risk=0.02, **HALF), Statistics(depths=depths))
    assert (made.exit_layers, made.risk) == ((17,), 0.02)
    assert made.prediction.mean_depth == pytest.approx(17 + 15 / made.prediction.tokens_per_pass)
    known = Statistics(depths=depths)
    step = predicted_step(SPEC, PROFILE, made, known, made.prediction.context_tokens)
    assert step is not None and 1 / step.seconds_per_token == pytest.approx(made.prediction.generated_tokens_per_s)
    assert predicted_text_s(SPEC, PROFILE, made, known, 10, 20) is not None
    assert predicted_text_s(SPEC, PROFILE, made, Statistics(), 10, 20) is None


def test_a_plan_made_again_keeps_the_exit_layers_that_there_are_heads_of() -> None:
    """Without the GPU it would choose others."""
    depths = tuple(DepthStatistics("certified", "", (n,), (share,)) for n, share in ((8, 0.5), (24, 0.95)))
    known, limits = Statistics(depths=depths), Limits(mode="certified", context_tokens=1024, gpu_layers=24)
    made = plan(SPEC, PROFILE, limits, known)
    alone = plan(SPEC, PROFILE, replace(limits, gpu_layers=0), known)
    replans = Replans.of(SPEC, PlanRequest(PROFILE, limits, None, known), limits, made)
    assert replans is not None and alone.exit_layers != made.exit_layers == replans.smaller(0, 1024).exit_layers


@pytest.mark.parametrize("mode", EARLY_EXIT_MODES)
def test_where_no_depths_are_known_parts_lie_as_for_full_mode(mode: str) -> None:
    known = Statistics(depths=(DepthStatistics("another", "", (4,), (0.9,)),))
    made, full = (plan(SPEC, PROFILE, Limits(mode=each, **HALF), known) for each in (mode, "full"))
    assert made.decode_placements == full.decode_placements and made.exit_layers == ()
    assert made.prediction.generated_tokens_per_s == full.prediction.generated_tokens_per_s
    assert "no speed is promised" in explained(made).replace("\n", " ") and made.prediction.mean_depth is None


@pytest.mark.parametrize("mode", ["specee", "certified"])
def test_published_exits_of_a_7b_model(mode: str) -> None:
    known = Statistics(published_statistics(32), depths=published_depths(32, 0.05))
    made = plan(SPEC, PROFILE, Limits(mode=mode, **HALF), known)
    assert made.exit_layers == ((16, 17, 18, 20, 22, 25, 27, 29) if mode == "specee" else (29,))
    assert made.prediction.other_mode_tokens_per_s is not None
    assert made.prediction.generated_tokens_per_s > made.prediction.other_mode_tokens_per_s
    assert from_json(Plan, to_json(made)) == made
    text = explained(made)
    assert f"{mode}: tokens exit after layer" in text and f"this plan, {mode}" in text and "transfers" in text
    assert "--mode full" in what_if(Request(SPEC, PROFILE, Limits(mode=mode, **HALF), known, made))


def test_how_long_a_catch_up_may_be_is_the_users() -> None:
    known = Statistics(depths=(of_shares({16: 0.9}),))
    made = plan(SPEC, PROFILE, Limits(mode="specee", draft_length=3, **HALF), known)
    assert made.draft_length == 3 and made.prediction.tokens_per_pass == pytest.approx(1 + 0.9 + 0.81)


def test_depths_of_another_model_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mode specee know an exit after layer 32, this model has 32; calibrate"):
        plan(SPEC, PROFILE, Limits(), Statistics(depths=(of_shares({32: 0.5}),)))


@pytest.mark.parametrize(
    ("layers", "shares"),
    [((), ()), ((2, 2), (0.1, 0.1)), ((0,), (0.1,)), ((1,), (1.5,)), ((1, 2), (0.6, 0.6)), ((1,), (float("nan"),))],
)
def test_depths_that_make_no_sense(layers: tuple[int, ...], shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"exit layers must ascend|shares of tokens are"):
        DepthStatistics("specee", "", layers, shares)


# What an emulated machine makes of it.


def ran(made: Plan, ends: list[int]) -> tuple[float, dict[str, float]]:
    """Seconds and bytes a token on the emulated machine: tokens that are judged at the plan's exit layers and exit
    after so many layers each, the rest waiting."""
    timeline = Timeline()
    executor = dummy(SPEC, made, PROFILE, timeline)
    try:
        sequence, waiting, noise = executor.cache.open_new(), list[PendingToken](), [DraftNoise(0.0, 0, 0, 0)]
        executor.prompt([Batch.of_sequence(sequence, 0, [0] * CONTEXT)])
        before, start_s = dict(executor.traffic.n_bytes), timeline.now_s
        for position, end in enumerate(ends, CONTEXT):
            waiting.append(PendingToken(0, sequence, position))
            for exit_layer in (layer for layer in made.exit_layers if layer <= end):
                hidden = advance(executor, waiting, exit_layer)
                assert hidden is not None
                executor.draft(hidden[-1:], noise, END)
            if end == SPEC.n_layers:
                hidden = advance(executor, waiting, end)
                assert hidden is not None
                executor.to_logits(hidden[-1:])
                waiting.clear()
        moved = {name: (n - before.get(name, 0)) / len(ends) for name, n in executor.traffic.n_bytes.items()}
        return (timeline.now_s - start_s) / len(ends), {name: n for name, n in moved.items() if n}
    finally:
        executor.close()


END = DraftEnd()
PLACES = {
    "half": {"gpu_layers": 16},
    "all": {"gpu_layers": 32},
    "the CPU": {"gpu_layers": 0},
    "streamed": {"overrides": ((r"layers\.([0-9]|1[0-5])\..*", "gpu"), (r"layers\..*", "stream"))},
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_seconds_and_bytes_are_those_of_the_emulated_machine(places: str, share: float) -> None:
    """Where all or none exit, texts have no chance in them; the bytes to the byte."""
    limits = Limits(mode="specee", draft_length=4, context_tokens=1024, **PLACES[places])  # type: ignore[arg-type]
    known = Statistics(depths=(of_shares({16: share, 24: 0.0}),))
    made = plan(SPEC, PROFILE, limits, known, predict_at_tokens=CONTEXT + 8)
    n = SPEC.n_layers
    ends = [n] * 16 if not share else [16, 16, 16, n] * 4
    seconds, moved = ran(made, ends)
    assert moved == pytest.approx({term.name: term.n_bytes for term in made.prediction.moved_terms})
    tolerance = 0.02 if places != "streamed" else 0.15
    assert 1 / seconds == pytest.approx(made.prediction.generated_tokens_per_s, rel=tolerance)
