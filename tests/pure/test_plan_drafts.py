"""Exact mode with drafts from elsewhere: when a sequence is planned, when exits are, and when neither."""

import math
import re
from dataclasses import replace

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.reports.explanation import explained
from hetero_ee.planning.schedule import WORTH_IT
from hetero_ee.planning.statistics import DraftRates, ExitRates, ExitStatistics, Statistics
from hetero_ee_profiles.records import from_json, to_json
from hetero_ee_profiles.reference import reference_profile

SPEC, PROFILE = known_spec("llama-2-7b"), reference_profile("rtx-4060-laptop-8gb")
LIMITS = Limits(vram_budget_bytes=3 * 2**30, context_tokens=512)
GOOD_EXITS = ExitStatistics("good exits", 32, {12: ExitRates(0.8, 0.95)})
BAD_EXITS = ExitStatistics("bad exits", 32, {12: ExitRates(0.8, 0.1)})
GOOD_DRAFTS = DraftRates("an n-gram source", (0.9,) * 8, 1e-5)
BAD_DRAFTS = DraftRates("a bad source", (0.01,), 1e-5)


def planned(statistics: Statistics, limits: Limits = LIMITS) -> Plan:
    return plan(SPEC, PROFILE, limits, statistics)


def test_good_drafts_are_planned_without_any_exits() -> None:
    full, found = planned(Statistics()), planned(Statistics(drafts=GOOD_DRAFTS))
    assert (full.mode, full.drafts, full.exit_layer) == ("full", None, None)
    assert (found.mode, found.drafts, found.exit_layer) == ("exact", "sequence", 0)
    assert found.prediction.generated_tokens_per_s > full.prediction.generated_tokens_per_s / WORTH_IT
    assert found.prediction.batch_per_pass == found.draft_length > 1
    assert found.prediction.tokens_per_pass == pytest.approx(sum(0.9**j for j in range(found.draft_length)))
    assert any(
        reason.startswith("Drafts come from an n-gram source; a draft-verify step of") for reason in found.reasons
    )
    assert f"sequences of {found.draft_length - 1} drafts from elsewhere" in explained(found)
    assert from_json(Plan, to_json(found)) == found


@pytest.mark.parametrize(
    ("statistics", "drafts"),
    [
        (Statistics(GOOD_EXITS, BAD_DRAFTS), "exit"),
        (Statistics(BAD_EXITS, GOOD_DRAFTS), "sequence"),
        (Statistics(BAD_EXITS, BAD_DRAFTS), None),
        (Statistics(GOOD_EXITS, replace(GOOD_DRAFTS, draft_s=1.0)), "exit"),
        (Statistics(None, replace(GOOD_DRAFTS, draft_s=1.0)), None),
    ],
)
def test_the_best_of_exits_sequences_and_neither(statistics: Statistics, drafts: str | None) -> None:
    found = planned(statistics)
    assert found.drafts == drafts and (found.mode == "exact") == (drafts is not None)
    rates = [planned(each).prediction.generated_tokens_per_s for each in (
        replace(statistics, drafts=None), replace(statistics, exits=None))]  # fmt: skip
    assert found.prediction.generated_tokens_per_s == max(rates)


@pytest.mark.sample(0)
def test_a_gain_of_less_than_the_predictions_err_by_is_declined() -> None:
    """Along falling acceptance there is a last sequence that is planned, and it is worth it."""
    full = planned(Statistics()).prediction.generated_tokens_per_s
    found = [planned(Statistics(drafts=DraftRates("a source", (p / 50,), 1e-4))) for p in range(51)]
    assert found[0].mode == "full" and found[-1].mode == "exact"
    assert [made.mode for made in found] == sorted((made.mode for made in found), reverse=True)
    first = next(made for made in found if made.mode == "exact")
    assert full / WORTH_IT < first.prediction.generated_tokens_per_s < 1.1 * full


def test_what_the_user_sets_wins() -> None:
    asked = replace(LIMITS, mode="exact", draft_length=3)
    assert planned(Statistics(drafts=BAD_DRAFTS), asked).draft_length == 3
    assert planned(Statistics(drafts=GOOD_DRAFTS), replace(LIMITS, mode="full")).drafts is None
    longest = planned(Statistics(drafts=GOOD_DRAFTS), replace(LIMITS, draft_length=12))
    assert longest.draft_length == 12 and longest.prediction.tokens_per_pass == pytest.approx(
        sum(0.9**j for j in range(12))
    )
    with pytest.raises(UsageError, match="drafts were measured"):
        planned(Statistics(), asked)


def test_acceptance_that_falls_makes_shorter_sequences() -> None:
    falling = DraftRates("falling", (0.9, 0.6, 0.0), 1e-5)
    lengths = [planned(Statistics(drafts=each)).draft_length for each in (GOOD_DRAFTS, falling)]
    assert lengths[0] > lengths[1] == 3


@pytest.mark.parametrize(
    ("acceptance", "draft_s"),
    [((), 0.0), ((0.5,) * 9, 0.0), ((1.1,), 0.0), ((math.nan,), 0.0), ((0.5,), -1.0), ((0.5,), math.inf)],
)
def test_rates_that_cannot_be(acceptance: tuple[float, ...], draft_s: float) -> None:
    with pytest.raises(ValueError, match=r"acceptance|draft_s"):
        DraftRates("drawn", acceptance, draft_s)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drafts": "magic"}, "drafts is 'magic'"),
        ({"drafts": None}, "does not go with"),
        ({"exit_layer": None}, "does not go with"),
        ({"mode": "full"}, "does not go with"),
        ({"version": 1}, "plan version 1, this engine reads version 7"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(planned(Statistics(drafts=GOOD_DRAFTS)), **change)  # type: ignore[arg-type]


def test_it_says_what_the_next_best_layers_and_lengths_would_bring() -> None:
    """None of them is better."""
    found = planned(Statistics(ExitStatistics("good exits", 32, {12: ExitRates(0.8, 0.95), 16: ExitRates(0.9, 0.97)})))
    (reason,) = [reason for reason in found.reasons if reason.startswith("Drafts are early exits")]
    (rate,) = re.findall(r"That makes (\d+\.\d\d) tokens/s;", reason)
    others = dict(re.findall(r"(a layer \w+|with at most \d+ tokens a step) (\d+\.\d\d)", reason))
    assert float(rate) == pytest.approx(found.prediction.generated_tokens_per_s, abs=0.006)
    assert {"a layer later", f"with at most {found.draft_length - 1} tokens a step"} <= others.keys()
    assert all(float(other) <= float(rate) for other in others.values())


def test_the_cpu_alone_is_left_out_where_its_memory_is_too_small() -> None:
    made = plan(SPEC, PROFILE, replace(LIMITS, vram_budget_bytes=7 * 2**30, context_tokens=8192, kv_type="fp16"))
    alone = plan(
        SPEC, PROFILE, replace(LIMITS, vram_budget_bytes=None, gpu_layers=0, context_tokens=8192, kv_type="fp16")
    )
    assert made.prediction.cpu_tokens_per_s == pytest.approx(alone.prediction.generated_tokens_per_s)
    short = plan(
        SPEC,
        PROFILE,
        replace(LIMITS, vram_budget_bytes=7 * 2**30, ram_budget_bytes=2**30, context_tokens=4096, kv_type="fp16"),
    )
    assert short.prediction.cpu_tokens_per_s is None
    assert re.search(r"^compared +the CPU alone +too little RAM$", explained(short), re.MULTILINE)
