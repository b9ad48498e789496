"""Output of `hetero-ee plan`: advice, colours on a terminal, and the curve over the VRAM budget."""

import re
import sys
from typing import TYPE_CHECKING

from hetero_ee_cli.terminal.output import has_colours, printable_lines
from hetero_ee_cli.terminal.streams import styled
from hetero_ee_profiles.units import GIB

if TYPE_CHECKING:
    from hetero_ee.planning.reports.what_if import Curve, Request

BAR_COLUMNS = 50
USED, ALL = "you are here", "all layers on the GPU"
NOTHING = 0.01  # relative change of a rate below the error of predictions
PROMPT = "Once upon a time"
STYLES = {
    r"^[a-z][a-z ]*?(?=  )": "bold",
    r"\bGPU\b": "green",
    r"\bCPU\b": "yellow",
    r"#+": "cyan",
    r"<- .*$": "bold",
    r"^hetero-ee .*$": "bold",
}
LETTER_STYLES = {"G": "green", "b": "blue", "C": "yellow", "s": "magenta", "d": "red"}


def what_if_lines(request: "Request") -> list[str]:
    """Return lines with the speed after one change each, the most helpful first and the useless ones last."""
    from hetero_ee.planning.reports.explanation import change
    from hetero_ee.planning.reports.what_if import what_if

    now, nothing, rows = request.made.prediction, [], []
    for words, other in what_if(request).items():
        rates = [
            (other.prediction.generated_tokens_per_s, now.generated_tokens_per_s),
            (other.prediction.prompt_tokens_per_s, now.prompt_tokens_per_s),
        ]
        if all(abs(new / old - 1) < NOTHING for new, old in rates):
            nothing.append(words)
            continue
        text, prompt = (f"{new:8.2f} tokens/s ({change(new, old)})" for new, old in rates)
        rows.append((rates[0][0], f"{words:30} text {text:28} prompt {prompt}"))
    lines = [line for _, line in sorted(rows, key=lambda row: -row[0])]
    if nothing:
        lines.append(f"nothing, or less than {NOTHING:.0%}: {', '.join(nothing)}")
    return [f"{label:10} {line}" for label, line in zip(["what if", *[""] * len(lines)], lines, strict=False)]


def show(text: str) -> None:
    """Print a report, with colours on a terminal unless NO_COLOR is set."""
    text = printable_lines(text)
    if not has_colours(sys.stdout):
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(text)
    for pattern, style in STYLES.items():
        for found in re.finditer(pattern, text, re.MULTILINE):
            shown.stylize(style, *found.span())
    for row in re.finditer(r"^(?:attention|ffn|embedding|head) +([GbCsd]+)$", text, re.MULTILINE):
        for run in re.compile(r"(.)\1*").finditer(text, *row.span(1)):
            shown.stylize(LETTER_STYLES[run[1]], *run.span())
    Console(file=styled(sys.stdout), highlight=False, soft_wrap=True).print(shown)


def curve_text(request: "Request") -> str:
    """Return a bar chart of expected tokens per second by VRAM budget."""
    from hetero_ee.planning.reports.what_if import vram_curve

    curve = vram_curve(request)
    most = max(point.tokens_per_s for point in curve.points)
    lines = [*_title(request), "", f"{'VRAM GiB':>8}  {'tokens/s':>8}"]
    for point in curve.points:
        bar = "#" * round(BAR_COLUMNS * point.tokens_per_s / most)
        known = ((USED, curve.used_bytes), (ALL, curve.all_bytes))
        marks = ", ".join(words for words, n_bytes in known if point.vram_budget_bytes == n_bytes)
        line = f"{point.vram_budget_bytes / GIB:8.2f}  {point.tokens_per_s:8.2f}  {bar}"
        lines.append(f"{line:{BAR_COLUMNS + 20}}  <- {marks}" if marks else line)
    return "\n".join([*lines, *_out_of_reach(curve)])


def _title(request: "Request") -> list[str]:
    made = request.made
    derived = "" if made.hardware_kind == "measured" else " (derived from data sheets, nothing measured)"
    context = f"context {made.context_tokens}, rates after {made.prediction.context_tokens} tokens"
    return [f"{made.name or made.model} on {made.hardware}{derived}", f"{context}, {made.kv_type} keys and values"]


def _out_of_reach(curve: "Curve") -> list[str]:
    """Return a line with the memory that the card lacks for all layers, or no line if it has enough."""
    if curve.all_bytes <= curve.points[-1].vram_budget_bytes:
        return []
    return [f"{ALL} would take {curve.all_bytes / GIB:.2f} GiB"]
