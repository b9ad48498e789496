"""Plan as `hetero-ee plan` prints it: advice, the command that runs it, and colours on a terminal."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero_ee_cli.terminal.output import printable_lines
from hetero_ee_cli.terminal.streams import styled

if TYPE_CHECKING:
    from hetero_ee.planning.reports.what_if import Request

NOTHING = 0.01  # of a rate: changes below it are within what predictions err by
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
    """Return the speed with one thing changed at a time, the most helpful first, then the useless changes."""
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


def command_line(words: Sequence[str]) -> str:
    """Return the words as a line for a shell."""
    return shlex.join(words)


def show(text: str) -> None:
    """Print a report, with colours on a terminal unless NO_COLOR is set."""
    text = printable_lines(text)
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
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
