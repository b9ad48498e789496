"""`hetero-ee bench`: tokens per second as llama-bench measures them, with the plan's prediction beside each."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_ee_cli.options.placement import (
    DraftHead,
    PlacementOptions,
    PlanFile,
    Stats,
    Trace,
    for_dense,
    placement_options,
)
from hetero_ee_cli.options.planning import (
    DraftTokens,
    GpuLayers,
    KvType,
    ModelArgument,
    Progress,
    RandomWeights,
    VramBudget,
    VramMargin,
    model_spec,
)
from hetero_ee_cli.options.settings import Offline, Quantizer
from hetero_ee_cli.reports.bench_table import FORMATS, Row, columns, footer, print_row, profile_date, whole_document
from hetero_ee_cli.reports.run_report import draft_lines
from hetero_ee_cli.terminal.output import say
from hetero_ee_cli.terminal.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.plan import Plan
    from hetero_ee.planning.statistics import Statistics
    from hetero_ee.runtime.devices.timeline import Span
    from hetero_ee.runtime.executors.executor import Executor
    from hetero_ee.speculation.drafting import Drafting
    from hetero_ee.speculation.statistics import DraftStatistics
    from hetero_ee_profiles.hardware import HardwareProfile

MAX_TOKENS, MAX_REPETITIONS, MAX_THREADS = 2**20, 1000, 1024
MICROSECONDS = 1e6
MAX_DRIFT = 0.2  # of the memory's speed since the profile was measured
FULL, EXACT, ALL = "full", "exact", "all"
EXACT_EXTRA_TOKENS = 2  # a text's begin token, and its first one, which is not timed

Test = tuple[int, int, int]  # tokens of prompt, text and depth


def bench(
    model: ModelArgument = None,
    random_weights: RandomWeights = None,
    n_prompt: Annotated[str, typer.Option("-p", "--n-prompt", help="Prompt lengths, as 128,512; 0 for none.")] = "512",
    n_gen: Annotated[str, typer.Option("-n", "--n-gen", help="Tokens to generate, likewise.")] = "128",
    n_depth: Annotated[str, typer.Option("-d", "--n-depth", help="Tokens in the context before, likewise.")] = "0",
    threads: Annotated[
        str | None, typer.Option("-t", "--threads", help="CPU threads, likewise. [default: all cores]")
    ] = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Times each test is run.")] = 5,
    output: Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.")] = "md",
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    quick: Annotated[bool, typer.Option(help="Predict from a quick profile instead of a full one.")] = False,
    refresh: Annotated[bool, typer.Option(help="Measure this machine again even where a profile is kept.")] = False,
    vram_budget: VramBudget = None,
    vram_margin: VramMargin = None,
    gpu_layers: GpuLayers = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "-ot", "--override", help="REGEX=gpu, cpu or stream for parts by name; may be given several times."
        ),
    ] = None,
    kv_type: KvType = None,
    mode: Annotated[
        str | None, typer.Option(help="full, exact, whose texts are the model's own, or all. [default: full]")
    ] = None,
    draft_length: DraftTokens = None,
    plan_file: PlanFile = None,
    draft_head: DraftHead = None,
    trace: Trace = None,
    stats: Stats = False,
    quantizer: Quantizer = None,
    offline: Offline = None,
) -> None:
    """Measure tokens per second, with names and keys as llama-bench has them, and what the plan predicted.

    A machine without a full profile is measured first, in some minutes. Run it on a quiet machine.
    """
    from hetero_ee.errors import UsageError

    prompts, texts, depths = _numbers(n_prompt, "-p"), _numbers(n_gen, "-n"), _numbers(n_depth, "-d")
    style = "json" if as_json else output
    _check(style, repetitions, mode, random_weights)
    if mode == ALL and plan_file is not None:
        raise UsageError("a plan has one mode; drop --mode all or --plan.")
    placement = placement_options(
        plan_file=plan_file,
        draft_head=draft_head,
        trace=trace,
        stats=stats,
        vram_budget=vram_budget,
        vram_margin=vram_margin,
        gpu_layers=gpu_layers,
        override=override,
        kv_type=kv_type,
        mode=None if mode == ALL else mode,
        draft_length=draft_length,
        ctx_size=None,
        threads=None,
    )
    with ending_at_once():
        from hetero_ee.config.settings import read_settings
        from hetero_ee_cli.commands.profile import profile_for
        from hetero_ee_profiles.host.process import physical_core_count
    from hetero_ee_cli.terminal.progress import stage_progress

    settings = read_settings()
    counts = _numbers(threads, "-t") if threads else [settings.value("threads") or physical_core_count()]
    tests = _tests(prompts, texts, depths, counts)
    rows: list[Row] = []
    with stage_progress() as progress:
        spec, name, folder = model_spec(model, random_weights, offline, progress)
        profile = profile_for(spec, folder, progress, quick=quick, refresh=refresh, threads=tuple(counts))
        subject = _Subject(spec, name, folder, settings.value("quantizer", quantizer), profile, placement, progress)
        for n_threads in counts:
            _compare_speed(profile, n_threads, progress)
            for each in _modes(mode, placement):
                for row in _rows(subject, each, n_threads, _of_mode(tests, each, mode), repetitions):
                    rows.append(row)
                    if style in ("md", "jsonl"):
                        print_row(rows, style)
        subject.write_trace()
    if style in ("json", "csv"):
        print(whole_document(rows, style), end="")
    if style == "md":
        print(footer(rows))


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured. folder: None for random weights. spans: of everything so far, where they are recorded."""

    spec: "ModelSpec"
    name: str
    folder: Path | None
    quantizer: str | None
    profile: "HardwareProfile"
    placement: PlacementOptions
    progress: Progress
    spans: "list[Span]" = field(default_factory=list)

    def limits(self, mode: str, threads: int) -> "Limits":
        """Those asked for, in this mode."""
        from hetero_ee.weights.model_weights import UNQUANTIZED

        limits = replace(self.placement.limits, mode=mode, threads=threads)
        return for_dense(limits) if self.quantizer == UNQUANTIZED else limits

    def write_trace(self) -> None:
        """What --trace asks for."""
        if self.placement.trace is not None:
            from hetero_ee.runtime.trace import write_trace

            write_trace(self.placement.trace, self.spans, f"bench of {self.name}")


@dataclass(frozen=True, slots=True)
class _Running:
    """The model ready to be measured. drafting: None in full mode."""

    executor: "Executor"
    plan: "Plan"
    statistics: "Statistics"
    drafting: "Drafting | None"


def _tests(prompts: list[int], texts: list[int], depths: list[int], threads: list[int]) -> list[Test]:
    """(prompt, text, depth) of each test: prompts first, as llama-bench has them. Raises UsageError."""
    from hetero_ee.errors import UsageError

    if not all(1 <= count <= MAX_THREADS for count in threads):
        raise UsageError(f"-t is {','.join(map(str, threads))}; expected 1 to {MAX_THREADS} threads.")
    pairs = [*((n, 0) for n in prompts if n), *((0, n) for n in texts if n)]
    if not pairs:
        raise UsageError("-p and -n are both 0, so there is nothing to measure; give one of them.")
    return [(n_prompt, n_gen, depth) for n_prompt, n_gen in pairs for depth in depths]


def _modes(asked: str | None, placement: PlacementOptions) -> list[str]:
    if asked == ALL:
        return [FULL, EXACT]
    return [asked or (FULL if placement.plan is None else placement.plan.mode)]


def _of_mode(tests: list[Test], mode: str, asked: str | None) -> list[Test]:
    """Those that say something new: a prompt is read in the same way in every mode."""
    return [test for test in tests if test[1]] if mode == EXACT and asked == ALL else tests


def _rows(subject: _Subject, mode: str, threads: int, tests: list[Test], repetitions: int) -> Iterator[Row]:
    """A row of each test."""
    if not tests:
        return
    max_tokens = max(map(sum, tests)) + (EXACT_EXTRA_TOKENS if mode == EXACT else 0)
    with _running(subject, mode, threads, max_tokens) as running:
        executor_us = _executor_us(running.executor)
        for test in tests:
            yield _row(running, subject, test, repetitions) | {"executor_us_per_layer": executor_us}


@contextmanager
def _running(subject: _Subject, mode: str, threads: int, max_tokens: int) -> Iterator[_Running]:
    """What runs the model in the folder, or random weights where there is none."""
    from hetero_ee.engine import Engine

    given = subject.placement.plan
    _check_context(given, max_tokens)
    if subject.folder is None:
        with _random(subject, mode, threads, max_tokens) as running:
            yield running
        return
    with Engine.from_pretrained(
        subject.folder,
        quantizer=subject.quantizer,
        context_tokens=max_tokens if given is None else 0,
        threads=threads,
        plan=given,
        profile=subject.profile,
        limits=subject.limits(mode, threads) if given is None else None,
        draft_head=subject.placement.draft_head,
        traces=subject.placement.trace is not None,
        progress=subject.progress,
    ) as engine:
        assert engine.plan is not None and engine.placement is not None, "with a profile there is a plan"
        yield _Running(engine.executor, engine.plan, engine.placement.statistics, engine.drafting)
        subject.spans.extend(engine.spans)


@contextmanager
def _random(subject: _Subject, mode: str, threads: int, max_tokens: int) -> Iterator[_Running]:
    from hetero_ee.planning.statistics import Statistics
    from hetero_ee.runtime.opening import Placement, open_placed
    from hetero_ee.weights.random_weights import random_weights

    limits = replace(subject.limits(mode, threads), context_tokens=max_tokens)
    traces = subject.placement.trace is not None
    placement = Placement(subject.profile, limits, subject.placement.plan, traces=traces)
    opened = open_placed(
        subject.spec,
        random_weights(subject.spec),
        placement,
        threads,
        time.perf_counter,
        lambda text: subject.progress(text, 0, 0),
    )
    try:
        yield _Running(opened.executor, opened.plan, Statistics(), None)
        subject.spans.extend(opened.spans())
    finally:
        opened.executor.close()


def _check_context(given: "Plan | None", max_tokens: int) -> None:
    from hetero_ee.errors import UsageError

    if given is not None and given.context_tokens < max_tokens:
        raise UsageError(
            f"the plan holds {given.context_tokens} tokens and the tests take {max_tokens}; plan with a larger -c, or "
            "lower -p, -n or -d."
        )


def _compare_speed(profile: "HardwareProfile", threads: int, progress: Progress) -> None:
    """Remarks that a kept profile promises another machine than there is now."""
    from hetero_ee.profiling.cpu import speed_since

    speed = speed_since(profile, threads, time.perf_counter)
    if abs(speed - 1) > MAX_DRIFT:
        progress(
            f"Memory is read at {speed:.0%} of the speed that the profile of {profile_date(profile)} has with "
            f"{threads} thread{'s' if threads > 1 else ''}: wait for a quiet machine, or measure it again with "
            "--refresh",
            0,
            0,
        )


def _executor_us(executor: "Executor") -> float | None:
    from hetero_ee.decoding.benchmark import executor_s_per_layer

    seconds = executor_s_per_layer(executor, time.perf_counter)
    return None if seconds is None else round(seconds * MICROSECONDS, 2)


def _row(running: _Running, subject: _Subject, test: Test, repetitions: int) -> Row:
    from hetero_ee.decoding.benchmark import bench_run, bench_text_run
    from hetero_ee.planning.times.prediction import predicted_run_s, predicted_text_s
    from hetero_ee.speculation.exact import generate_exact
    from hetero_ee.speculation.statistics import DraftCounts

    made, executor, clock = running.plan, running.executor, time.perf_counter
    n_prompt, n_gen, n_depth = test
    known = subject.spec, subject.profile, made
    found: DraftStatistics | None = None
    if running.drafting is not None and n_gen:
        counts = DraftCounts()
        way = partial(generate_exact, drafting=running.drafting, counts=counts)
        run = bench_text_run(executor, way, n_gen, n_depth, repetitions=repetitions, clock=clock)
        found = counts.statistics(subject.spec.n_layers, running.drafting.exit_layer)
        predicted_s = predicted_text_s(*known, running.statistics, n_gen, n_depth)
    else:
        run = bench_run(executor, *test, chunk_tokens=made.prefill_chunk_tokens, repetitions=repetitions, clock=clock)
        predicted_s = predicted_run_s(*known, n_prompt, n_gen, n_depth)
    if found is not None and subject.placement.stats:
        say("\n".join([f"{run.name}, {made.mode}", *draft_lines(found)]))
    return columns(run, made, executor.weights, subject.name, subject.profile, predicted_s, found)


def _numbers(text: str, flag: str) -> list[int]:
    """A comma list of whole numbers. Raises UsageError."""
    from hetero_ee.errors import UsageError, shown

    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 9 and int(word) <= MAX_TOKENS for word in words):
        raise UsageError(f"{flag} is {shown(text)}; expected whole numbers up to {MAX_TOKENS}, separated by commas.")
    return [int(word) for word in words]


def _check(style: str, repetitions: int, mode: str | None, random_weights: str | None) -> None:
    from hetero_ee.errors import UsageError, shown

    if style not in FORMATS:
        raise UsageError(f"--output is {shown(style)}; expected one of {', '.join(FORMATS)}.")
    if not 1 <= repetitions <= MAX_REPETITIONS:
        raise UsageError(f"--repetitions is {repetitions}; expected 1 to {MAX_REPETITIONS}.")
    if mode not in (None, FULL, EXACT, ALL):
        raise UsageError(f"--mode is {shown(mode)}; expected one of {FULL}, {EXACT}, {ALL}.")
    if mode in (EXACT, ALL) and random_weights is not None:
        raise UsageError(
            f"random weights write no text that drafts could come true in; drop --mode {mode}, or name a model."
        )
    if style != "md":
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
