"""Modes side by side: a table, a document, and speed against quality as a picture."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_ee_cli.terminal.output import table

if TYPE_CHECKING:
    from hetero_ee.evaluation.estimate import Estimate
    from hetero_ee.evaluation.run import ModeResult, Refused

RATE, SHARE, PLAIN, SMALL = "{:.1f}", "{:.1%}", "{:.2f}", "{:.4f}"
COLUMNS = (  # of the table: title, field of ModeResult, how it is written
    ("tokens/s", "tokens_per_s", RATE),
    ("emulated", "emulated_tokens_per_s", RATE),
    ("same tokens", "identity", SHARE),
    ("same until", "tokens_before_divergence", RATE),
    ("perplexity", "perplexity", PLAIN),
    ("KL, nats", "kl_nats", SMALL),
    ("doubled words", "doubled_words", SHARE),
    ("depth", "mean_depth", PLAIN),
    ("CPU passes", "cpu_passes_per_token", PLAIN),
)
INTERVALS = "\N{PLUS-MINUS SIGN}: half of the 95 % interval over the texts."


def eval_table(results: "Sequence[ModeResult]", plus_minus: str) -> str:
    """A row for each; columns in which nothing was counted are left out. plus_minus: as it can be printed."""
    shown = [each for each in COLUMNS if any(getattr(result, each[1]) is not None for result in results)]
    rows = [("", *(title for title, _, _ in shown))]
    for result in results:
        cells = (_cell(getattr(result, name), style, plus_minus) for _, name, style in shown)
        rows.append((result.variant.name, *cells))
    return table(rows, numbers_from=1)


def _cell(estimate: "Estimate | None", style: str, plus_minus: str) -> str:
    if estimate is None:
        return "-"
    value = style.format(estimate.value)
    half = 0.0 if estimate.low is None or estimate.high is None else (estimate.high - estimate.low) / 2
    return value if style.format(half) == style.format(0.0) else f"{value} {plus_minus}{style.format(half)}"


def eval_rows(results: "Sequence[ModeResult | Refused]") -> list[dict[str, Any]]:
    """For JSON, which has no infinity: null there."""
    return [_finite(asdict(each.variant) | {"name": each.variant.name} | _fields(each)) for each in results]


def _fields(result: "ModeResult | Refused") -> dict[str, Any]:
    return {name: value for name, value in asdict(result).items() if name != "variant"}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_eval_plot(results: "Sequence[ModeResult]", title: str, file: Path) -> None:
    """A line for each policy through its ways to have keys and values. Raises UsageError where matplotlib is missing or
    the file can't be written."""
    from hetero_ee.calibration.plot import require_matplotlib, save_picture

    figure = require_matplotlib().Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(result.variant.policy for result in results):
        points = [each for each in results if each.variant.policy == policy and _is_drawable(each)]
        points.sort(key=lambda each: each.perplexity.value if each.perplexity else 0.0)
        places, speeds = [each.perplexity for each in points], [each.speed for each in points]
        style = {"xerr": _bars(places), "yerr": _bars(speeds), "marker": "o", "capsize": 2}
        axes.errorbar(
            [each.value for each in places if each], [each.value for each in speeds if each], **style, label=policy
        )
        for each in points:
            if each.variant.exit_kv is not None and each.perplexity and each.speed:
                spot = each.perplexity.value, each.speed.value
                axes.annotate(each.variant.exit_kv, spot, (4, 4), textcoords="offset points", fontsize="small")
    emulated = any(each.emulated_tokens_per_s is not None for each in results)
    axes.set(
        xlabel="perplexity of held-out text", ylabel=f"{'emulated ' * emulated}tokens/s", xscale="log", ylim=(0, None)
    )
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, file)


def _is_drawable(result: "ModeResult") -> bool:
    return result.perplexity is not None and math.isfinite(result.perplexity.value) and result.speed is not None


def _bars(estimates: "Sequence[Estimate | None]") -> list[list[float]]:
    """Lengths below and above the values."""
    ends = [(each.value, each.low, each.high) for each in estimates if each is not None]
    below = [0.0 if low is None else value - low for value, low, _ in ends]
    above = [0.0 if high is None or not math.isfinite(high) else high - value for value, _, high in ends]
    return [below, above]
