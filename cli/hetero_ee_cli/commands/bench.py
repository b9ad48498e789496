"""`hetero-ee bench`: tokens per second as llama-bench measures them, each with the plan's prediction."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee.config import Progress
from hetero_ee.errors import UsageError, shown
from hetero_ee.options.engine import MODEL_OPTIONS
from hetero_ee_cli.options.engine import ModelArgument, ModelOptions, RandomWeights
from hetero_ee_cli.options.flags import one_of, with_options
from hetero_ee_cli.options.placement import Placed, PlacementOptions
from hetero_ee_cli.options.planning import LimitOptions
from hetero_ee_cli.reports.bench_table import FORMATS, Row, columns, print_rows, profile_date
from hetero_ee_cli.reports.run_report import draft_lines
from hetero_ee_cli.terminal.output import say
from hetero_ee_cli.terminal.progress import stage_progress
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.plan import Plan
    from hetero_ee.planning.statistics import DraftRates, Statistics
    from hetero_ee.runtime.devices.timeline import Span
    from hetero_ee.runtime.executors.executor import Executor
    from hetero_ee.speculation.drafting import Drafting
    from hetero_ee.speculation.sources.source import DraftSource
    from hetero_ee.speculation.statistics import DraftStatistics
    from hetero_ee_profiles.hardware import HardwareProfile

MAX_TOKENS, MAX_REPETITIONS = 2**20, 1000
MICROSECONDS = 1e6
MAX_DRIFT = 0.2  # of the memory's speed since the profile was measured
FULL, EXACT, ALL = "full", "exact", "all"
EXACT_EXTRA_TOKENS = 2  # a text's begin token, and its first one, which is not timed

Test = tuple[int, int, int]  # tokens of prompt, text and depth
Mode = Annotated[
    str | None,
    typer.Option(
        help="full, exact (on text of the model's own), or all for both. [default: full]",
        autocompletion=one_of((FULL, EXACT, ALL)),
    ),
]
SyntheticAcceptance = Annotated[
    str | None,
    typer.Option(
        help="In exact mode, drafts are right this often, like 0.78, or 0.8,0.7,0.6 by position; a draft head "
        "computes them, one with random weights where the model has none.",
        metavar="RATES",
    ),
]
Output = Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.", autocompletion=one_of(FORMATS))]


@with_options(
    without={
        "profile": "it always compares with one",
        "mode": "it takes both modes, too",
        "threads": "it takes several numbers",
        "verbose": "its rows have the times and rates",
    }
)
def bench(
    limits: LimitOptions,
    placement: PlacementOptions,
    engine: ModelOptions,
    model: ModelArgument = None,
    random_weights: RandomWeights = None,
    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", help="Prompt lengths, like 128,512; 0: none.")] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help="Numbers of tokens to generate; 0: none.")] = "128",
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", help="Context lengths to start from.")] = "0",
    threads: Annotated[
        str | None, typer.Option("-t", "--threads", help="Numbers of CPU threads. [default: all cores]")
    ] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Times to run each test.")] = 5,
    mode: Mode = None,
    synthetic_acceptance: SyntheticAcceptance = None,
    output: Output = "md",
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    quick: Annotated[bool, typer.Option(help="Predict from a quick profile instead of a full one.")] = False,
    refresh: Annotated[bool, typer.Option(help="Measure this machine again even if a profile was kept.")] = False,
) -> None:
    """Measure tokens per second, with llama-bench's names and keys, and compare them with what the plan predicts.

    A machine without a full profile is measured first, which takes a few minutes. Nothing else should be running.
    """
    lengths = [_numbers(text, flag) for text, flag in ((n_prompt, "-p"), (n_gen, "-n"), (n_depth, "-d"))]
    style = "json" if as_json else output
    rates = None if synthetic_acceptance is None else _rates(synthetic_acceptance)
    _check(style, repetitions, mode, random_weights, rates)
    if random_weights is not None and engine.given.get("sparsity") is not None:
        raise UsageError("random weights have no neurons that could be left out; name a model, or drop --sparsity.")
    if mode == ALL and placement.plan_file is not None:
        raise UsageError("a plan has one mode; drop --mode all or --plan.")
    placed = placement.checked(LimitOptions(**limits.given | {"mode": None if mode == ALL else mode}), engine)
    opening = engine.arguments(model)
    modes = (FULL, EXACT) if mode == ALL else (mode or (placed.plan.mode if placed.plan else FULL),)
    runs = _Runs(_thread_counts(threads, opening["threads"]), modes, _tests(*lengths), repetitions)
    runs.check_context(engine.given.get("context_tokens"))
    with ending_at_once():
        from hetero_ee.hub.draft_head import resolve_draft_head
        from hetero_ee_cli.commands.profile import profile_for
    with stage_progress() as progress, ExitStack() as kept:
        spec, name, folder = engine.model_spec(model, random_weights, progress)
        profile = profile_for(spec, folder, progress, quick=quick, refresh=refresh, threads=runs.threads)
        head = resolve_draft_head(placed.options.draft_head, offline=opening["offline"], progress=progress)
        if rates is not None:
            head = _synthetic_head(Path(kept.enter_context(TemporaryDirectory())), spec, rates, folder, head)
        placed = replace(placed, options=replace(placed.options, draft_head=None if head is None else str(head)))
        weights = opening["quantizer"], engine.given.get("sparsity")
        subject = _Subject(
            spec, name, folder, *weights, engine.given.get("context_tokens"), profile, placed, progress, rates
        )
        print_rows(_measured(subject, runs), style)
    placement.write_trace(subject.spans, f"bench of {name}")


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured."""

    spec: "ModelSpec"
    name: str
    folder: Path | None  # None for random weights
    quantizer: str | None
    sparsity: str | None
    context_tokens: int | None  # None: as many as the tests need
    profile: "HardwareProfile"
    placed: Placed
    progress: Progress
    synthetic: "DraftRates | None" = None  # how often drafts are right; None: as often as they are
    spans: "list[Span]" = field(default_factory=list)  # of everything so far, if recorded


@dataclass(frozen=True, slots=True)
class _Runs:
    """What is run of it."""

    threads: tuple[int, ...]
    modes: tuple[str, ...]
    tests: list[Test]
    repetitions: int

    def context_tokens(self, mode: str) -> int:
        """That the longest test needs."""
        return max(map(sum, self.tests)) + (EXACT_EXTRA_TOKENS if mode == EXACT else 0)

    def check_context(self, n_tokens: int | None) -> None:
        """Raises UsageError where a context of so many is too short; None: as long as it has to be."""
        needed = max(map(self.context_tokens, self.modes))
        if n_tokens and n_tokens < needed:
            raise UsageError(
                MODEL_OPTIONS["context_tokens"],
                f" is {n_tokens} and the tests need {needed}; raise it, or lower -p, -n or -d.",
            )


@dataclass(frozen=True, slots=True)
class _Running:
    """The model ready to be measured."""

    executor: "Executor"
    plan: "Plan"
    statistics: "Statistics"
    drafting: "Drafting | None"  # None in full mode

    @property
    def sources(self) -> "tuple[DraftSource, ...]":
        """What reads prompts beside the model."""
        return () if self.drafting is None else self.drafting.sources


def _tests(prompts: list[int], texts: list[int], depths: list[int]) -> list[Test]:
    """(prompt, text, depth) of each test, prompts first as in llama-bench. Raises UsageError."""
    pairs = [*((n, 0) for n in prompts if n), *((0, n) for n in texts if n)]
    if not pairs:
        raise UsageError("-p and -n are both 0, so there is nothing to measure; give one of them.")
    return [(n_prompt, n_gen, depth) for n_prompt, n_gen in pairs for depth in depths]


def _thread_counts(asked: str | None, usual: int) -> tuple[int, ...]:
    """Those of -t, or the settings' number. Raises UsageError."""
    with ending_at_once():
        from hetero_ee_profiles.host.process import processor_count, usable_threads

    counts, most = _numbers(asked, "-t") if asked else [], processor_count()
    if not all(0 <= count <= most for count in counts):
        raise UsageError(f"-t is {asked}; expected 0 (one on each physical core) to {most}, this process's processors.")
    return tuple(usable_threads(count) for count in counts or [usual])


def _measured(subject: _Subject, runs: _Runs) -> Iterator[Row]:
    """The rows, as they are measured."""
    for threads in runs.threads:
        _compare_speed(subject.profile, threads, subject.progress)
        for mode in runs.modes:
            yield from _rows(subject, mode, threads, runs)


def _rows(subject: _Subject, mode: str, threads: int, runs: _Runs) -> Iterator[Row]:
    """A row for each test, but for those of exact mode, where both are asked for, that full mode takes as long for."""
    from hetero_ee.decoding.benchmark import executor_s_per_layer

    with _running(subject, mode, threads, runs.context_tokens(mode)) as running:
        seconds = executor_s_per_layer(running.executor, time.perf_counter)
        executor_us = None if seconds is None else round(seconds * MICROSECONDS, 2)
        for test in runs.tests:
            if len(runs.modes) > 1 and mode == EXACT and test[0] and not running.sources:
                continue
            yield _row(running, subject, test, runs.repetitions) | {"executor_us_per_layer": executor_us}


@contextmanager
def _running(subject: _Subject, mode: str, threads: int, max_tokens: int) -> Iterator[_Running]:
    """Opens the model in the folder, or random weights. Raises UsageError for too small a context."""
    from hetero_ee.engine import Engine
    from hetero_ee.planning.request import PlanRequest
    from hetero_ee.runtime.opening import open_planned
    from hetero_ee.speculation.opening import DraftKnowledge, open_drafting
    from hetero_ee.weights.random_weights import random_weights

    spec, placed, given = subject.spec, subject.placed, subject.placed.plan
    traces = placed.options.trace is not None
    if given is not None and given.context_tokens < max_tokens:
        raise UsageError(
            f"the plan has a context of {given.context_tokens} tokens and the tests need {max_tokens}; plan with a "
            "larger -c, or lower -p, -n or -d."
        )
    context_tokens = subject.context_tokens or max_tokens
    limits = replace(placed.limits, mode=mode, threads=threads, context_tokens=context_tokens)
    if subject.folder is None:
        head = placed.options.draft_head
        knowledge = DraftKnowledge(draft_head=None if head is None else Path(head))
        statistics = knowledge.statistics(spec, subject.profile, threads)
        placement = PlanRequest(subject.profile, limits, given, statistics, traces=traces)
        opened = open_planned(
            spec,
            random_weights(spec),
            placement,
            threads,
            time.perf_counter,
            lambda text: subject.progress(text, 0, 0),
        )
        with closing(opened.executor):
            found = open_drafting(knowledge, opened, subject.profile, lambda text: subject.progress(text, 0, 0))
            drafting = None if found is None else found.drafting
            yield _Running(opened.executor, opened.plan, statistics, drafting)
            subject.spans.extend(opened.spans())
        return
    with Engine.from_pretrained(
        subject.folder,
        quantizer=subject.quantizer,
        sparsity=subject.sparsity,
        context_tokens=context_tokens if given is None else subject.context_tokens or 0,
        threads=threads,
        plan=given,
        profile=subject.profile,
        limits=limits if given is None else None,
        draft_head=placed.options.draft_head,
        traces=traces,
        progress=subject.progress,
    ) as engine:
        assert engine.plan is not None and engine.plan_request is not None, "with a profile there is a plan"
        yield _Running(engine.executor, engine.plan, engine.plan_request.statistics, engine.drafting)
        subject.spans.extend(engine.spans)


def _compare_speed(profile: "HardwareProfile", threads: int, progress: Progress) -> None:
    """Warns if memory is now faster or slower than when the profile was measured."""
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
    from hetero_ee.decoding.benchmark import DraftedWay, bench_reading_run, bench_run, bench_text, bench_text_run
    from hetero_ee.planning.times.prediction import predicted_run_s, predicted_text_s
    from hetero_ee.speculation.exact import generate_exact
    from hetero_ee.speculation.sources.synthetic import synthetic
    from hetero_ee.speculation.statistics import DraftCounts

    made, executor, clock = running.plan, running.executor, time.perf_counter
    n_prompt, n_gen, n_depth = test
    known = subject.spec, subject.profile, made
    found: DraftStatistics | None = None  # None where nothing was drafted or read
    predicted_s: float | None
    reading = running.statistics.of_plan(made).reading(made.drafts)
    predicted_s = predicted_run_s(*known, n_prompt, n_gen, n_depth, reading)
    if running.drafting is not None and (n_gen or running.sources):
        drafting = running.drafting
        if subject.synthetic is not None:
            text = bench_text(executor, n_depth + n_gen + 1 if n_gen else 0, clock)
            drafting = synthetic(drafting, text, subject.synthetic, subject.spec.vocab_size)
        counts, drafted = DraftCounts(), partial(generate_exact, drafting=drafting)
        closing = [source.close for source in running.sources]
        way = DraftedWay(drafted, partial(drafted, counts=counts), closing)
        if n_gen:
            run = bench_text_run(executor, way, n_gen, n_depth, repetitions=repetitions, clock=clock)
            predicted_s = predicted_text_s(*known, running.statistics, n_gen, n_depth)
        else:
            run = bench_reading_run(executor, way, n_prompt, n_depth, repetitions=repetitions, clock=clock)
        found = counts.statistics(subject.spec.n_layers, running.drafting.exit_layer)
    else:
        run = bench_run(executor, *test, chunk_tokens=made.prefill_chunk_tokens, repetitions=repetitions, clock=clock)
    if found is not None and subject.placed.options.stats:
        say("\n".join([f"{run.name}, {made.mode}", *draft_lines(found)]))
    row = columns(run, made, executor.weights, subject.name, subject.profile, predicted_s, found)
    synthetic_rates = subject.synthetic if made.mode == EXACT else None
    return row | {"synthetic_acceptance": None if synthetic_rates is None else list(synthetic_rates.acceptance)}


def _synthetic_head(
    made: Path, spec: "ModelSpec", rates: "DraftRates", model_folder: Path | None, head: str | Path | None
) -> Path:
    """The folder `made`, with the model's draft head in it, or one of random weights. Raises ModelError."""
    from hetero_ee.speculation.opening import DRAFT_HEAD_FOLDER
    from hetero_ee.speculation.sources.synthetic import write_synthetic_head

    own = None if head is None else Path(head)
    if own is None and model_folder is not None and (model_folder / DRAFT_HEAD_FOLDER).is_dir():
        own = model_folder / DRAFT_HEAD_FOLDER
    write_synthetic_head(made, spec, rates, own)
    return made


def _numbers(text: str, flag: str) -> list[int]:
    """Whole numbers separated by commas. Raises UsageError."""
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 9 and int(word) <= MAX_TOKENS for word in words):
        raise UsageError(f"{flag} is {shown(text)}; expected whole numbers up to {MAX_TOKENS}, separated by commas.")
    return [int(word) for word in words]


def _rates(text: str) -> "DraftRates":
    """Of draft positions, separated by commas. Raises UsageError."""
    from hetero_ee.planning.statistics import DraftRates

    try:
        return DraftRates("synthetic acceptance", tuple(map(float, text.split(","))), 0.0)
    except ValueError as error:
        raise UsageError(
            f"--synthetic-acceptance is {shown(text)}; expected 1 to 8 rates from 0 to 1, separated by commas."
        ) from error


def _check(
    style: str, repetitions: int, mode: str | None, random_weights: str | None, synthetic: "DraftRates | None"
) -> None:
    if style not in FORMATS:
        raise UsageError(f"--output is {shown(style)}; expected one of {', '.join(FORMATS)}.")
    if not 1 <= repetitions <= MAX_REPETITIONS:
        raise UsageError(f"--repetitions is {repetitions}; expected 1 to {MAX_REPETITIONS}.")
    if mode not in (None, FULL, EXACT, ALL):
        raise UsageError(f"--mode is {shown(mode)}; expected one of {FULL}, {EXACT}, {ALL}.")
    if mode in (EXACT, ALL) and random_weights is not None and synthetic is None:
        raise UsageError(
            f"drafts are never right where weights are random; drop --mode {mode}, name a model, or say how often "
            "they shall be right by --synthetic-acceptance."
        )
    if mode not in (EXACT, ALL) and synthetic is not None:
        raise UsageError("--synthetic-acceptance is of drafts, which full mode does not make; add --mode exact or all.")
    if style != "md":
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
