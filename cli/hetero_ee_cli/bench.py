"""`hetero-ee bench`: tokens per second as llama-bench measures them, with the plan's prediction beside each."""

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_ee_cli.planning_options import ModelArgument, RandomWeights, model_spec
from hetero_ee_cli.setting_options import Offline, Quantizer
from hetero_ee_cli.signals import ending_at_once

if TYPE_CHECKING:
    from hetero_ee.decoding.benchmark import BenchRun
    from hetero_ee.models.spec import ModelSpec
    from hetero_ee.planning.plan import Plan
    from hetero_ee.runtime.executor import Executor
    from hetero_ee_profiles.hardware import HardwareProfile

FORMATS = ("md", "csv", "json", "jsonl")
MAX_TOKENS, MAX_REPETITIONS, MAX_THREADS = 2**20, 1000, 1024
NANOSECONDS, MICROSECONDS = 1e9, 1e6
MAX_DRIFT = 0.2  # of the memory's speed since the profile was measured

Row = dict[str, Any]


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
    refresh: Annotated[bool, typer.Option(help="Measure this machine anew even where a profile is kept.")] = False,
    plan: Annotated[Path | None, typer.Option(help="Predict from this plan's JSON instead of a new one.")] = None,
    quantizer: Quantizer = None,
    offline: Offline = None,
) -> None:
    """Measure tokens per second, with names and keys as llama-bench has them, and what the plan predicted.

    A machine without a full profile is measured first, in some minutes. Run it on a quiet machine.
    """
    prompts, texts, depths = _numbers(n_prompt, "-p"), _numbers(n_gen, "-n"), _numbers(n_depth, "-d")
    style = "json" if as_json else output
    _check(style, repetitions)
    with ending_at_once():
        from hetero_ee.config.settings import read_settings
        from hetero_ee_cli.profile import profile_for
        from hetero_ee_profiles.process import physical_core_count
    from hetero_ee_cli.progress import stage_progress

    settings = read_settings()
    counts = _numbers(threads, "-t") if threads else [settings.value("threads") or physical_core_count()]
    tests = _tests(prompts, texts, depths, counts)
    rows: list[Row] = []
    with stage_progress() as progress:
        spec, name, folder = model_spec(model, random_weights, offline, progress)
        given = _given_plan(plan, spec)
        profile = profile_for(spec, folder, progress, quick=quick, refresh=refresh, threads=tuple(counts))
        for n_threads in counts:
            _compare_speed(profile, n_threads, progress)
            max_tokens = max(map(sum, tests))
            options = {"quantizer": settings.value("quantizer", quantizer), "context_tokens": max_tokens}
            with _executor(folder, spec, options | {"threads": n_threads, "progress": progress}) as executor:
                executor_us = _executor_us(executor)
                for test in tests:
                    row = _row(executor, name, profile, n_threads, test, repetitions, given)
                    rows.append(row | {"executor_us_per_layer": executor_us})
                    if style in ("md", "jsonl"):
                        _print_row(rows, style)
    if style in ("json", "csv"):
        print(_document(rows, style), end="")
    if style == "md":
        print(_footer(rows))


def _tests(prompts: list[int], texts: list[int], depths: list[int], threads: list[int]) -> list[tuple[int, int, int]]:
    """(prompt, text, depth) of each test: prompts first, as llama-bench has them. Raises UsageError."""
    from hetero_ee.errors import UsageError

    if not all(1 <= count <= MAX_THREADS for count in threads):
        raise UsageError(f"-t is {','.join(map(str, threads))}; expected 1 to {MAX_THREADS} threads.")
    pairs = [*((n, 0) for n in prompts if n), *((0, n) for n in texts if n)]
    if not pairs:
        raise UsageError("-p and -n are both 0, so there is nothing to measure; give one of them.")
    return [(n_prompt, n_gen, depth) for n_prompt, n_gen in pairs for depth in depths]


def _given_plan(file: Path | None, spec: "ModelSpec") -> "Plan | None":
    from hetero_ee.planning.plan import Plan
    from hetero_ee.planning.planner import check_fits

    if file is None:
        return None
    made = Plan.load(file)
    check_fits(made, spec)
    return made


@contextmanager
def _executor(folder: Path | None, spec: "ModelSpec", options: dict[str, Any]) -> "Iterator[Executor]":
    """What runs the model in `folder`, or random weights where there is none."""
    from hetero_ee.engine import Engine
    from hetero_ee.runtime.opening import open_on_cpu
    from hetero_ee.weights.random_weights import random_weights

    if folder is not None:
        with Engine.from_pretrained(folder, **options) as engine:
            yield engine.executor
        return
    weights = random_weights(spec)
    executor = open_on_cpu(spec, weights, options["context_tokens"], options["threads"], options["progress"])
    try:
        yield executor
    finally:
        executor.close()


def _compare_speed(profile: "HardwareProfile", threads: int, progress: Callable[[str, int, int], None]) -> None:
    """Remarks that a kept profile promises another machine than there is now."""
    from hetero_ee.runtime.cpu_profiling import speed_since

    speed = speed_since(profile, threads, time.perf_counter)
    if abs(speed - 1) > MAX_DRIFT:
        progress(
            f"Memory is read at {speed:.0%} of the speed that the profile of {_date(profile)} has with {threads} "
            f"thread{'s' if threads > 1 else ''}: wait for a quiet machine, or measure it anew with --refresh",
            0,
            0,
        )


def _date(profile: "HardwareProfile") -> str:
    return profile.cpu[0].read_bytes_per_s.origin.date


def _executor_us(executor: "Executor") -> float | None:
    from hetero_ee.decoding.benchmark import executor_s_per_layer

    seconds = executor_s_per_layer(executor, time.perf_counter)
    return None if seconds is None else round(seconds * MICROSECONDS, 2)


def _row(
    executor: "Executor",
    name: str,
    profile: "HardwareProfile",
    threads: int,
    test: tuple[int, int, int],
    repetitions: int,
    given: "Plan | None",
) -> Row:
    from hetero_ee.decoding.benchmark import bench_run
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.planner import plan as make_plan

    n_prompt, n_gen, n_depth = test
    # A text of n tokens is predicted at the length it has in its middle.
    context = n_depth + (n_prompt or max(1, n_gen // 2))
    # Nothing runs on a GPU yet.
    limits = Limits(context_tokens=max(executor.cache.max_tokens, context), threads=threads, gpu_layers=0)
    made = given or make_plan(executor.spec, profile, limits, predict_at_tokens=context)
    run = bench_run(
        executor,
        n_prompt,
        n_gen,
        n_depth,
        chunk_tokens=made.prefill_chunk_tokens,
        repetitions=repetitions,
        clock=time.perf_counter,
    )
    return _columns(run, made, executor, name, profile, threads)


def _columns(
    run: "BenchRun", made: "Plan", executor: "Executor", name: str, profile: "HardwareProfile", threads: int
) -> Row:
    import datetime
    from statistics import fmean, stdev

    from hetero_ee import __version__
    from hetero_ee.planning.prediction import predicted_run_s

    weights = executor.weights
    samples_ns = [round(seconds * NANOSECONDS) for seconds in run.samples_s]
    predicted_s = predicted_run_s(executor.spec, profile, made, run.n_prompt, run.n_gen, run.n_depth)
    return {
        "build_commit": __version__,
        "cpu_info": profile.machine.cpu_model,
        "gpu_info": profile.machine.gpu_model or "",
        "model_filename": name,
        "model_type": f"{made.model} {weights.quantizer}",
        "model_size": weights.n_bytes,
        "model_n_params": weights.n_weights,
        "n_batch": made.prefill_chunk_tokens,
        "n_threads": threads,
        "n_gpu_layers": made.gpu_layers,
        "n_prompt": run.n_prompt,
        "n_gen": run.n_gen,
        "n_depth": run.n_depth,
        "test": run.name,
        "test_time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "avg_ns": round(fmean(samples_ns)),
        "stddev_ns": round(stdev(samples_ns)) if len(samples_ns) > 1 else 0,
        "avg_ts": run.avg_ts,
        "stddev_ts": run.stddev_ts,
        "samples_ns": samples_ns,
        "samples_ts": list(run.samples_ts),
        "predicted_ts": (run.n_prompt or run.n_gen) / predicted_s,
        "vram_budget": made.vram_budget_bytes,
        "plan_hash": made.sha256,
        "profile_date": _date(profile),
    }


def _print_row(rows: list[Row], style: str) -> None:
    """The last row, below the head of the table where it is the first."""
    row = rows[-1]
    if style == "jsonl":
        print(json.dumps(row), flush=True)
        return
    if len(rows) == 1:
        print("| model | size | params | threads | test | t/s | predicted t/s |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {row['model_filename']} {row['model_type'].split()[-1]} | {row['model_size'] / 2**20:.1f} MiB "
        f"| {row['model_n_params'] / 1e6:.1f} M | {row['n_threads']} | {row['test']} "
        f"| {row['avg_ts']:.2f} ± {row['stddev_ts']:.2f} | {row['predicted_ts']:.2f} |",
        flush=True,
    )


def _footer(rows: list[Row]) -> str:
    """What holds for all rows: where the predictions come from, and what the executor itself takes."""
    lines = ["", f"predicted from a profile measured on {rows[0]['profile_date']}; --refresh measures anew"]
    spent = {row["n_threads"]: row["executor_us_per_layer"] for row in rows}
    known = [f"{us:.1f} (threads: {threads})" for threads, us in spent.items() if us is not None]
    if known:
        lines.append(f"microseconds a layer of the executor, kernels not counted: {', '.join(known)}")
    return "\n".join(lines)


def _document(rows: list[Row], style: str) -> str:
    if style == "json":
        return json.dumps(rows, indent=1) + "\n"
    text = io.StringIO()
    flat = [
        {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()} for row in rows
    ]
    writer = csv.DictWriter(text, list(flat[0]), quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _numbers(text: str, flag: str) -> list[int]:
    """A comma list of whole numbers. Raises UsageError."""
    from hetero_ee.errors import UsageError, shown

    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 9 and int(word) <= MAX_TOKENS for word in words):
        raise UsageError(f"{flag} is {shown(text)}; expected whole numbers up to {MAX_TOKENS}, separated by commas.")
    return [int(word) for word in words]


def _check(style: str, repetitions: int) -> None:
    from hetero_ee.errors import UsageError, shown

    if style not in FORMATS:
        raise UsageError(f"--output is {shown(style)}; expected one of {', '.join(FORMATS)}.")
    if not 1 <= repetitions <= MAX_REPETITIONS:
        raise UsageError(f"--repetitions is {repetitions}; expected 1 to {MAX_REPETITIONS}.")
    if style != "md":
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
