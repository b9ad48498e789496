"""Comparison of modes as a table, a JSON document, and a plot of speed against quality."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_ee_cli.terminal.output import table

if TYPE_CHECKING:
    from hetero_ee.evaluation.metrics import Estimate
    from hetero_ee.evaluation.run import ModeResult, Refused

RATE, SHARE, PLAIN, SMALL = "{:.1f}", "{:.1%}", "{:.2f}", "{:.4f}"
COLUMNS = (  # of the table: title, field of ModeResult, format
    ("tokens/s", "tokens_per_s", RATE),
    ("emulated", "emulated_tokens_per_s", RATE),
    ("x full", "speedup", PLAIN),
    ("same tokens", "identity", SHARE),
    ("same until", "tokens_before_divergence", RATE),
    ("changed", "changed", SHARE),
    ("perplexity", "perplexity", PLAIN),
    ("KL, nats", "kl_nats", SMALL),
    ("repeated words", "doubled_words", SHARE),
    ("depth", "mean_depth", PLAIN),
    ("CPU passes", "cpu_passes_per_token", PLAIN),
)
INTERVALS = "\N{PLUS-MINUS SIGN}: half of the 95 % interval over the texts."


def eval_table(results: "Sequence[ModeResult]", plus_minus: str) -> str:
    """Return a table with one row per mode, without empty columns.

    `plus_minus` is the sign between a value and its interval that the output can show.
    """
    shown = [each for each in COLUMNS if any(getattr(result, each[1]) is not None for result in results)]
    rows = [("", *(title for title, _, _ in shown))]
    for result in results:
        cells = (estimate_cell(getattr(result, name), style, plus_minus) for _, name, style in shown)
        rows.append((result.variant.name, *cells))
    return table(rows, numbers_from=1)


def estimate_cell(estimate: "Estimate | None", style: str, plus_minus: str) -> str:
    """Return the value and half of its interval, without the latter if it would be shown as 0."""
    if estimate is None:
        return "-"
    value = style.format(estimate.value)
    half = 0.0 if estimate.low is None or estimate.high is None else (estimate.high - estimate.low) / 2
    return value if style.format(half) == style.format(0.0) else f"{value} {plus_minus}{style.format(half)}"


def eval_rows(results: "Sequence[ModeResult | Refused]") -> list[dict[str, Any]]:
    """Return the rows for JSON, with null instead of infinity."""
    fields = [(each.variant.name, asdict(each)) for each in results]
    return [finite(each.pop("variant") | {"name": name} | each) for name, each in fields]


def finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by None."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_eval_plot(results: "Sequence[ModeResult]", title: str, file: Path) -> None:
    """Plot speed against the divergence from full mode, with a line through the variants of each mode.

    Perplexity is left out, since its interval mostly shows how much the texts differ in difficulty.
    """
    from hetero_ee_cli.reports.picture import require_matplotlib, save_picture

    figure = require_matplotlib().Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for mode in dict.fromkeys(each.variant.mode for each in results):
        points = [point for each in results if each.variant.mode == mode for point in _points(each)]
        points.sort(key=lambda point: point[0].value)
        places, speeds = [place for place, _, _ in points], [speed for _, speed, _ in points]
        bars = {"xerr": _bars(places), "yerr": _bars(speeds), "capsize": 2}
        axes.errorbar([each.value for each in places], [each.value for each in speeds], **bars, marker="o", label=mode)
        for place, speed, words in points:
            axes.annotate(words, (place.value, speed.value), (4, 4), textcoords="offset points", fontsize="small")
    emulated = "emulated " if any(each.emulated_tokens_per_s for each in results) else ""
    axes.set(xlabel="KL divergence from full mode, nats a token", ylabel=f"{emulated}tokens/s", ylim=(0, None))
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save_picture(figure, file)


def _points(result: "ModeResult") -> "Iterator[tuple[Estimate, Estimate, str]]":
    """Yield the position and the label of each mode with finite values."""
    place, speed = result.kl_nats, result.emulated_tokens_per_s or result.tokens_per_s
    if place is not None and speed is not None and math.isfinite(place.value):
        yield place, speed, result.variant.detail


def _bars(estimates: "Sequence[Estimate]") -> list[list[float]]:
    """Return the lengths of the error bars below and above the values. A bar to infinity has length 0."""
    ends = [(each.value, each.low, each.high) for each in estimates]
    below = [0.0 if low is None else value - low for value, low, _ in ends]
    return [below, [0.0 if high is None or not math.isfinite(high) else high - value for value, _, high in ends]]
