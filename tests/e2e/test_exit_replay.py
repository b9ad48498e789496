"""Replayed exits and drafts on small shapes come as often as was asked, and take as long as the formula says."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.statistics import ExitRates, ExitStatistics, Statistics
from hetero_ee.speculation.opening import open_drafting
from hetero_ee_profiles.reference import reference_profile

pytestmark = pytest.mark.sample(0)
FOLDER = Path(__file__).parents[1] / "bench"
N_LAYERS, BOUNDARY, N_TEXTS, N_TOKENS = 4, 2, 3, 256
SPEC = replace(known_spec("tinyllama-1.1b"), n_layers=N_LAYERS, sliding_windows=(None,) * N_LAYERS, vocab_size=500)
PROFILE = reference_profile("rtx-4060-laptop-8gb")
ACCEPTANCE = (0.9, 0.7, 0.5)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its modules import each other as a script's do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("exit_replay")


@pytest.fixture
def stories(bench: Any, demo: Path, kernels: Path) -> Iterator[Any]:
    opened = importlib.import_module("exit_demo").Stories.opened(1, 12)
    yield opened
    opened.engine.close()


def exits(exit_rate: float, precision: float, refused_precision: float = 0.0) -> Statistics:
    rates = {BOUNDARY: ExitRates(exit_rate, precision, refused_precision)}
    return Statistics(ExitStatistics("asked for", N_LAYERS, rates))


def chains(bench: Any, acceptance: tuple[float, ...], on_gpu: bool) -> Statistics:
    rates = bench.head_rates(SPEC, PROFILE, acceptance)
    return Statistics(None, rates.by_gpu if on_gpu else replace(rates, by_gpu=None))


def replay(bench: Any, gpu_layers: int = BOUNDARY, **limits: Any) -> Any:
    asked = Limits(gpu_layers=gpu_layers, context_tokens=512, kv_type="fp16", **limits)
    return bench.Replay(SPEC, "small", PROFILE, asked, N_TEXTS, N_TOKENS)


@pytest.mark.parametrize(("exit_rate", "precision"), [(0.6, 0.9), (0.85, 0.7)])
def test_replayed_exits_come_as_often_as_asked_and_take_what_the_formula_says(
    bench: Any, exit_rate: float, precision: float
) -> None:
    row = replay(bench, draft_length=5).row("exits", exits(exit_rate, precision), "exact")
    assert (row.label, row.drafts, row.exit_layer) == ("timing replay, no quality claim", "exit", BOUNDARY)
    assert row.exit_rate == pytest.approx(exit_rate, abs=0.06) and row.precision == pytest.approx(precision, abs=0.06)
    assert row.share_of_formula == pytest.approx(1, abs=0.1)
    assert 1 < row.tokens_per_pass < row.rows_per_pass < row.draft_length == 5
    assert row.r > 1 and row.kappa >= 1 and 0 < row.head_s < row.draft_s < row.full_token_s


@pytest.mark.parametrize("refused_precision", [0.2, 0.8])
def test_replayed_guesses_are_right_as_often_as_asked(bench: Any, refused_precision: float) -> None:
    p, q = 0.5, 0.9
    row = replay(bench, draft_length=2).row("exits", exits(p, q, refused_precision), "exact")
    right = (1 - p) * refused_precision + p * q * (p * q + (1 - p) * refused_precision)  # of one row, and of two
    assert row.ahead == pytest.approx(right, abs=0.06)
    assert row.share_of_formula == pytest.approx(1, abs=0.05)
    alone = replay(bench, 0, draft_length=2).row("exits", exits(p, q, refused_precision), "exact")
    assert alone.ahead is None  # all on the CPU


@pytest.mark.parametrize("gpu_layers", [0, BOUNDARY])
def test_replayed_drafts_are_accepted_as_often_as_asked(bench: Any, gpu_layers: int) -> None:
    drafts = chains(bench, ACCEPTANCE, on_gpu=gpu_layers > 0)
    row = replay(bench, gpu_layers, draft_length=4).row("head", drafts, "exact")
    assert (row.drafts, row.cpu_share) == ("sequence", 1 - gpu_layers / N_LAYERS)
    assert row.acceptance == pytest.approx(ACCEPTANCE, abs=0.09)
    assert row.share_of_formula == pytest.approx(1, abs=0.1) and row.speedup > 1


def test_drafts_that_do_not_pay_are_declined(bench: Any) -> None:
    row = replay(bench).row("the planner's choice", exits(0.5, 0.1))
    assert (row.mode, row.drafts, row.speedup, row.share_of_formula) == ("full", None, 1, 1)


@pytest.mark.parametrize("gpu_layers", [0, 6])
def test_the_draft_head_lies_where_it_is_fastest(bench: Any, stories: Any, gpu_layers: int) -> None:
    """Beside the model's head on the GPU, where there is one; a plan without one has no use for it there."""
    exit_demo = importlib.import_module("exit_demo")
    limits = Limits(gpu_layers=gpu_layers, context_tokens=512, mode="exact")
    opened = exit_demo.opened_on(stories, PROFILE, limits)
    drafting = open_drafting(exit_demo.KNOWLEDGE, opened, PROFILE, pytest.fail)
    assert drafting is not None
    stories.written(opened, drafting)
    spans = opened.spans()
    where = "gpu" if gpu_layers else "cpu"
    assert opened.plan.draft_device == where
    assert {span.lane for span in spans if span.name.startswith(("draft_head.", "draft_vocabulary"))} == {where}
    n_passes = sum(span.name == "draft_head.ffn" for span in spans)
    assert 1 < n_passes == 1 + sum(span.name == "draft_vocabulary" for span in spans)  # one reads the prompt
    assert any(span.lane == "gpu" for span in spans) == (gpu_layers > 0)
    opened.executor.close()


def test_another_text_in_exact_mode_is_no_result(bench: Any) -> None:
    exit_rows = importlib.import_module("exit_rows")
    full, exact = (exit_rows.Timed(((1, 2, last),), 1.0, 2) for last in (3, 4))
    row = replay(bench).row("exits", exits(0.6, 0.9))
    with pytest.raises(AssertionError, match="says something else"):
        exit_rows.row(row, exit_rows.StepCounts(), None, full, exact)
