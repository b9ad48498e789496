"""`hetero-ee bench`: measures tokens per second like llama-bench, next to the plan's prediction."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_ee.config import Progress
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee_cli.options.bench import ALL, EXACT, FULL, BenchOptions, Test
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions, RandomWeights
from hetero_ee_cli.options.flags import with_options
from hetero_ee_cli.options.placement import LimitOptions, Placed, PlacementOptions
from hetero_ee_cli.reports.bench_table import Row, columns, print_rows, profile_date
from hetero_ee_cli.reports.run_report import draft_lines
from hetero_ee_cli.terminal.output import say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.planning.statistics import Statistics
    from hetero_ee.runtime.devices.timeline import Span
    from hetero_ee.runtime.executors.executor import Executor
    from hetero_ee.speculation.drafting import Drafting
    from hetero_ee.speculation.sources.source import DraftSource
    from hetero_ee.speculation.statistics import DraftStatistics
    from hetero_ee_profiles.hardware import HardwareProfile

MICROSECONDS = 1e6
MAX_DRIFT = 0.2  # tolerated change of the memory's speed since the profile
EXACT_EXTRA_TOKENS = 2  # a text's begin token, and its first one, which is not timed


@with_options(
    without={
        "profile": "it always compares with this machine's profile",
        "mode": "it takes both modes, too",
        "threads": "it takes several numbers",
        "verbose": "its rows have the times and rates",
    }
)
def bench(
    wanted: BenchOptions,
    limits: LimitOptions,
    placement: PlacementOptions,
    engine: ModelOptions,
    model: ModelArgument = None,
    random_weights: RandomWeights = None,
) -> None:
    """Measure tokens per second, with llama-bench's names and keys, and compare them with what the plan predicts.

    A machine without a full profile is measured first, which takes a few minutes. Nothing else should be running.
    """
    wanted.check()
    if random_weights is not None and "sparsity" in engine.given:
        raise UsageError("random weights have no neurons that could be left out; name a model, or drop --sparsity.")
    if wanted.mode == ALL and placement.plan_file is not None:
        raise UsageError("a plan has one mode; drop --mode all or --plan.")
    placed = placement.checked(LimitOptions(**limits.given | {"mode": wanted.single_mode}), engine)
    opening, modes = engine.arguments(model), wanted.modes(FULL if placed.plan is None else placed.plan.mode)
    if random_weights is not None and (modes != (FULL,) or placement.draft_model is not None):
        raise UsageError("drafts are never right if weights are random; name a model, or measure mode full only.")
    threads, tests = wanted.thread_counts(opening["threads"]), wanted.tests()
    context_tokens, needed = engine.given.get("context_tokens"), max(_context_tokens(tests, mode) for mode in modes)
    if context_tokens and context_tokens < needed:
        raise UsageError(
            MODEL_OPTIONS["context_tokens"],
            f" is {context_tokens} and the tests need {needed}; raise it, or lower -p, -n or -d.",
        )
    with ending_at_once():
        from hetero_ee.hub.draft_head import resolve_draft_head
        from hetero_ee_cli.commands.profile import profile_for
    with stage_progress() as progress:
        spec, name, folder = engine.model_spec(model, random_weights, progress)
        profile = profile_for(spec, folder, progress, quick=wanted.quick, refresh=wanted.refresh, threads=threads)
        head = resolve_draft_head(placed.options.draft_head, offline=opening["offline"], progress=progress)
        placed = replace(placed, options=replace(placed.options, draft_head=None if head is None else str(head)))
        weights = opening["quantizer"], engine.given.get("sparsity"), opening["activations"]
        subject = _Subject(spec, name, folder, *weights, context_tokens, profile, placed, progress)
        print_rows(_rows(subject, wanted.repetitions, tests, modes, threads), wanted.style)
    placement.write_trace(subject.spans, f"bench of {name}")


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model to measure, and the machine."""

    spec: "ModelSpec"
    name: str
    folder: Path | None  # None for random weights
    quantizer: str | None
    sparsity: str | None
    activations: str
    context_tokens: int | None  # None: up to the longest test
    profile: "HardwareProfile"
    placed: Placed
    progress: Progress
    spans: "list[Span]" = field(default_factory=list)  # all work so far, if recorded


def _context_tokens(tests: list[Test], mode: str) -> int:
    """Return the context length that the longest test needs."""
    return max(map(sum, tests)) + (EXACT_EXTRA_TOKENS if mode == EXACT else 0)


@dataclass(frozen=True, slots=True)
class _Running:
    executor: "Executor"
    plan: "Plan"
    statistics: "Statistics"
    drafting: "Drafting | None"  # None in full mode

    @property
    def sources(self) -> "tuple[DraftSource, ...]":
        """Draft sources, which read prompts as the model does."""
        return () if self.drafting is None else self.drafting.sources


def _rows(
    subject: _Subject, repetitions: int, tests: list[Test], modes: tuple[str, ...], thread_counts: tuple[int, ...]
) -> Iterator[Row]:
    """Yield each row as soon as it is measured. If both modes run, exact mode omits tests that equal full mode's."""
    from hetero_ee.decoding.benchmark import executor_s_per_layer

    for threads in thread_counts:
        _compare_speed(subject.profile, threads, subject.progress)
        for mode in modes:
            with _running(subject, mode, threads, _context_tokens(tests, mode)) as running:
                seconds = executor_s_per_layer(running.executor, time.perf_counter)
                executor_us = None if seconds is None else round(seconds * MICROSECONDS, 2)
                for test in tests:
                    if len(modes) > 1 and mode == EXACT and test[0] and not running.sources:
                        continue
                    yield _row(running, subject, test, repetitions) | {"executor_us_per_layer": executor_us}


def _running(subject: _Subject, mode: str, threads: int, max_tokens: int) -> AbstractContextManager[_Running]:
    """Open the model, or random weights, with a context of at least max_tokens."""
    given = subject.placed.plan
    if given is not None and given.context_tokens < max_tokens:
        raise UsageError(
            f"the plan has a context of {given.context_tokens} tokens and the tests need {max_tokens}; plan with a "
            "larger -c, or lower -p, -n or -d."
        )
    context_tokens = subject.context_tokens or max_tokens
    limits = replace(subject.placed.limits, mode=mode, threads=threads, context_tokens=context_tokens)
    return _random(subject, limits) if subject.folder is None else _of_folder(subject, limits, subject.folder)


@contextmanager
def _random(subject: _Subject, limits: "Limits") -> Iterator[_Running]:
    from hetero_ee.config import warner
    from hetero_ee.planning.request import PlanRequest
    from hetero_ee.runtime.opening import open_planned
    from hetero_ee.weights.random_weights import random_weights

    spec, placed = subject.spec, subject.placed
    request = PlanRequest(subject.profile, limits, placed.plan, traces=placed.options.trace is not None)
    weights, warn = random_weights(spec), warner(subject.progress)
    opened = open_planned(spec, weights, request, limits.threads, time.perf_counter, warn)
    with closing(opened.executor):
        yield _Running(opened.executor, opened.plan, request.statistics, None)
        subject.spans.extend(opened.spans())


@contextmanager
def _of_folder(subject: _Subject, limits: "Limits", folder: Path) -> Iterator[_Running]:
    from hetero_ee.engine import Engine

    given, options = subject.placed.plan, subject.placed.options
    with Engine.from_pretrained(
        folder,
        quantizer=subject.quantizer,
        sparsity=subject.sparsity,
        activations=subject.activations,
        context_tokens=limits.context_tokens if given is None else subject.context_tokens or 0,
        threads=limits.threads,
        plan=given,
        profile=subject.profile,
        limits=limits if given is None else None,
        draft_head=options.draft_head,
        draft_model=options.draft_model,
        traces=options.trace is not None,
        progress=subject.progress,
    ) as engine:
        assert engine.plan is not None and engine.plan_request is not None, "with a profile there is a plan"
        yield _Running(engine.executor, engine.plan, engine.plan_request.statistics, engine.drafting)
        subject.spans.extend(engine.spans)


def _compare_speed(profile: "HardwareProfile", threads: int, progress: Progress) -> None:
    """Warn if memory is faster or slower now than when the profile was measured."""
    from hetero_ee.profiling.cpu import speed_since

    speed = speed_since(profile, threads, time.perf_counter)
    if abs(speed - 1) > MAX_DRIFT:
        progress(
            f"Memory is read at {speed:.0%} of the speed in the profile of {profile_date(profile)} with "
            f"{threads} thread{'s' if threads > 1 else ''}: stop other programs, or measure again with --refresh",
            0,
            0,
        )


def _row(running: _Running, subject: _Subject, test: Test, repetitions: int) -> Row:
    from hetero_ee.decoding.benchmark import Bench
    from hetero_ee.planning.times.prediction import predicted_run_s, predicted_text_s
    from hetero_ee.speculation.exact import ExactMode
    from hetero_ee.speculation.statistics import DraftCounts

    made, executor, clock = running.plan, running.executor, time.perf_counter
    timing = Bench(executor, repetitions, clock)
    n_prompt, n_gen, n_depth = test
    known = subject.spec, subject.profile, made
    found: DraftStatistics | None = None  # None if nothing was drafted or read
    predicted_s: float | None
    reading = running.statistics.of_plan(made).reading(made.drafts)
    predicted_s = predicted_run_s(*known, n_prompt, n_gen, n_depth, reading)
    if running.drafting is not None and (n_gen or running.sources):
        drafting, counts = running.drafting, DraftCounts()
        warm_up, timed = (partial(ExactMode, executor, drafting, each, clock) for each in (DraftCounts(), counts))
        if n_gen:
            run = timing.text_run(warm_up, timed, n_gen, n_depth)
            predicted_s = predicted_text_s(*known, running.statistics, n_gen, n_depth)
        else:
            run = timing.reading_run(warm_up, timed, n_prompt, n_depth)
        found = counts.statistics(subject.spec.n_layers, running.drafting.exit_layer)
    else:
        run = timing.run(*test, chunk_tokens=made.prefill_chunk_tokens)
    if found is not None and subject.placed.options.stats:
        say("\n".join([f"{run.name}, {made.mode}", *draft_lines(found)]))
    return columns(run, made, executor.weights, subject.name, subject.profile, predicted_s, found)
