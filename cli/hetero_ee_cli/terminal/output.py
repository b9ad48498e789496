"""What a command says: results on standard output, everything else in lines on standard error."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hetero_ee import __version__
from hetero_ee_cli.terminal.streams import styled

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GeneratedToken

JSON_SCHEMA = 2
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def print_tokens(
    tokens: "Iterator[GeneratedToken]", quiet: bool = False, prompt: str = ""
) -> "tuple[list[GeneratedToken], bool]":
    """Prints the text as it is generated. Returns the tokens, and whether Ctrl-C ended them.

    prompt: what is continued, shown with the first token: before it, a terminal's line is for how far the prompt is.
    """
    sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="")  # type: ignore[union-attr]
    seen: list[GeneratedToken] = []
    try:
        for token in tokens:
            if prompt and not seen:
                echo_prompt(prompt)
            seen.append(token)
            if token.text and not quiet:
                sys.stdout.write(token.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        return seen, True
    return seen, False


def print_document(document: Mapping[str, Any], *, with_version: bool = False) -> None:
    """One JSON document on one line, with the version of its schema and of hetero_ee."""
    print(json.dumps({"schema": JSON_SCHEMA} | ({"version": __version__} if with_version else {}) | dict(document)))


def table(rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> str:
    """Aligned columns. numbers_from: those from this one on end at the same place, as numbers do."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if numbers_from is None or n < numbers_from else str.rjust for n in range(len(widths))]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    )


def print_path(path: Path) -> None:
    """A result that scripts use: as it is, but for a terminal."""
    print(printable(str(path)) if sys.stdout.isatty() else path)


def encodable(text: str, instead: str) -> str:
    """The text, or what stands in for it where standard output's encoding lacks its characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return instead
    return text


def echo_prompt(text: str) -> None:
    """Shows a terminal the text that is continued, dim where it can be; elsewhere nothing."""
    if sys.stdout.isatty():
        lines = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        styled(sys.stdout).write(f"{DIM}{lines}{PLAIN}" if has_colours(sys.stdout) else lines)
        sys.stdout.flush()


def has_colours(stream: TextIO) -> bool:
    """Whether escape sequences of colours are welcome there: a terminal that knows them, and no NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(lines: str) -> None:
    """Lines on standard error."""
    print(printable_lines(lines), file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """An error, on standard error."""
    say(f"hetero-ee: {printable(message)}")  # one line, whatever is in it


def printable(message: str) -> str:
    """One line with control characters escaped: names of files and tensors come from outside."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def printable_lines(text: str) -> str:
    """The same line by line."""
    return "\n".join(map(printable, text.split("\n")))
