"""Rows of `hetero-ee bench` with llama-bench's keys and some more, printed as a table, CSV or JSON."""

import csv
import io
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hetero_ee_cli.reports.run_report import reading_words
from hetero_ee_cli.terminal.output import encodable

if TYPE_CHECKING:
    from hetero_ee.decoding.benchmark import BenchRun
    from hetero_ee.planning.plan import Plan
    from hetero_ee.speculation.statistics import DraftStatistics
    from hetero_ee.weights.model_weights import ModelWeights
    from hetero_ee_profiles.hardware import HardwareProfile

FORMATS = ("md", "csv", "json", "jsonl")
NANOSECONDS = 1e9
LEAST_US = 0.05  # least executor overhead shown; the clock itself costs less

Row = dict[str, Any]


def columns(
    run: "BenchRun",
    made: "Plan",
    weights: "ModelWeights",
    name: str,
    profile: "HardwareProfile",
    predicted_s: float | None,
    found: "DraftStatistics | None",
) -> Row:
    """Return the row of a run.

    Args:
        predicted_s: Predicted seconds; None if the acceptance of the drafts is unknown.
        found: Draft statistics; None if nothing was drafted.
    """
    import datetime
    from statistics import fmean, stdev

    from hetero_ee import __version__

    samples_ns = [round(seconds * NANOSECONDS) for seconds in run.samples_s]
    return {
        "build_commit": __version__,
        "cpu_info": profile.machine.cpu_model,
        "gpu_info": profile.machine.gpu_model or "",
        "model_filename": name,
        "model_type": f"{made.model} {weights.quantizer}",
        "model_size": weights.n_bytes,
        "model_n_params": weights.n_weights,
        "n_batch": made.prefill_chunk_tokens,
        "n_threads": made.threads,
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
        "predicted_ts": None if predicted_s is None else (run.n_prompt or run.n_gen) / predicted_s,
        "vram_budget": made.vram_budget_bytes,
        "plan_hash": made.sha256,
        "profile_date": profile_date(profile),
        "mode": made.mode,
        "exit_layer": made.exit_layer,
        "draft_length": made.draft_length,
        "acceptance": found.acceptance if found is not None and run.n_gen else None,
        "tokens_per_pass": found.tokens_per_pass if found is not None and run.n_gen else None,
        "reading_shares": found.reading_shares(sum(run.samples_s)) if found is not None and run.n_prompt else None,
    }


def print_rows(rows: Iterable[Row], style: str) -> None:
    """Print each row as soon as it is measured, or one document with all rows."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        if style in ("md", "jsonl"):
            print_row(found, style)
    if style in ("json", "csv"):
        print(whole_document(found, style), end="")
    if style == "md":
        print(footer(found))


def print_row(rows: list[Row], style: str) -> None:
    """Print the last of these rows, and the table's head before the first one."""
    row, predicted = rows[-1], rows[-1]["predicted_ts"]
    if style == "jsonl":
        print(json.dumps(row), flush=True)
        return
    if len(rows) == 1:
        print("| model | size | params | threads | mode | test | t/s | predicted t/s |")
        print("| --- | ---: | ---: | ---: | :--- | ---: | ---: | ---: |")
    spread = f" {encodable('±', '+-')} {row['stddev_ts']:.2f}" if len(row["samples_ns"]) > 1 else ""
    rate = f"{row['avg_ts']:.2f}{spread}"
    print(
        f"| {row['model_filename']} {row['model_type'].split()[-1]} | {row['model_size'] / 2**20:.1f} MiB "
        f"| {row['model_n_params'] / 1e6:.1f} M | {row['n_threads']} | {_mode(row)} | {row['test']} "
        f"| {rate} | {'' if predicted is None else f'{predicted:.2f}'} |",
        flush=True,
    )


def _mode(row: Row) -> str:
    if row["acceptance"] is None:
        return f"{row['mode']}{reading_words(row['reading_shares'] or {})}"
    return f"{row['mode']}: {row['tokens_per_pass']:.1f} tok/pass, {row['acceptance']:.0%} accepted"


def footer(rows: list[Row]) -> str:
    """Return a line about all rows: the source of the predictions, and the executor's overhead."""
    lines = ["", f"predicted from a profile measured on {rows[0]['profile_date']}; --refresh measures again"]
    spent = {row["n_threads"]: row["executor_us_per_layer"] for row in rows}
    known = [
        f"{f'{us:.1f}' if us >= LEAST_US else 'not measurable'} (threads: {threads})"
        for threads, us in spent.items()
        if us is not None
    ]
    if known:
        lines.append(f"executor overhead in microseconds per layer, kernels not counted: {', '.join(known)}")
    return "\n".join(lines)


def whole_document(rows: list[Row], style: str) -> str:
    if style == "json":
        return json.dumps(rows, indent=1) + "\n"
    text = io.StringIO()
    flat = [
        {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in row.items()}
        for row in rows
    ]
    writer = csv.DictWriter(text, list(flat[0]), quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def profile_date(profile: "HardwareProfile") -> str:
    return profile.cpu[0].read_bytes_per_s.origin.date
