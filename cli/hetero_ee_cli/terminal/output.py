"""Output of commands: results go to standard output, and all other lines to standard error."""

import json
import os
import stat
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
    """Print the text while it is generated, and return its tokens and whether Ctrl-C ended them.

    `prompt` is the text that is continued. It is shown with the first token: until then, a terminal's line shows the
    progress of the prompt.
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


def end_line(text: str) -> None:
    """End the line of a generated text, so that a report on standard error begins on a line of its own.

    A pipe or file receives the text unchanged. If standard error goes to the same place, the newline is written there.
    """
    if sys.stdout.isatty():
        print("" if text.endswith("\n") else "\n")
    elif text and not text.endswith("\n") and _is_shown_with_errors():
        say("")


def _is_shown_with_errors() -> bool:
    """Return whether standard output and standard error appear together.

    True for the same pipe or file, or if the output is piped while errors go to a terminal (as in `... | tee FILE`).
    """
    try:
        out, errors = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # a stream without a file descriptor, as in tests
        return False
    return os.path.samestat(out, errors) or (sys.stderr.isatty() and stat.S_ISFIFO(out.st_mode))


def print_document(document: Mapping[str, Any], *, with_version: bool = False) -> None:
    """Print a JSON document on one line, including the versions of its schema and of hetero_ee."""
    print(json.dumps({"schema": JSON_SCHEMA} | ({"version": __version__} if with_version else {}) | dict(document)))


def table(rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> str:
    """Return the rows as aligned columns. Columns from `numbers_from` on are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if numbers_from is None or n < numbers_from else str.rjust for n in range(len(widths))]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    )


def print_path(path: Path) -> None:
    """Print a path for scripts. On a terminal, control characters are escaped."""
    print(printable(str(path)) if sys.stdout.isatty() else path)


def encodable(text: str, instead: str) -> str:
    """Return the text, or `instead` if standard output's encoding lacks a character."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return instead
    return text


def echo_prompt(text: str) -> None:
    """Print the text that is continued if standard output is a terminal, dimmed if possible."""
    if sys.stdout.isatty():
        lines = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        styled(sys.stdout).write(f"{DIM}{lines}{PLAIN}" if has_colours(sys.stdout) else lines)
        sys.stdout.flush()


def has_colours(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that supports colours, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(lines: str) -> None:
    print(printable_lines(lines), file=sys.stderr, flush=True)


def say_loading(model: str | None) -> None:
    """Print which model is being loaded, on a terminal only, since loading can take seconds."""
    if is_terminal():
        say(f"Loading {printable(model or 'the demo model')} ...")


def is_terminal() -> bool:
    return sys.stderr.isatty()


def complain(message: str) -> None:
    say(f"hetero-ee: {printable(message)}")  # one line, whatever is in it


def printable(message: str) -> str:
    """Return the message on one line with control characters escaped, since names in it come from outside."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
