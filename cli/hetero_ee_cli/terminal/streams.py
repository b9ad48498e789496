"""Prepares the three standard streams, so that reading and writing never fail because of the streams themselves.

Text for a terminal loses all control characters except newline and tab. Otherwise a model's text and the names in its
files could move the cursor, ring, or write to the clipboard. Pipes and files get the text unchanged.
"""

import io
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

NAMES = ("stdin", "stdout", "stderr")
# C0, DEL and C1. A return goes silently: most come before a newline, and alone it would only overwrite its line.
_SAFE = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {*b"\n\t"}, "\N{REPLACEMENT CHARACTER}") | {0x0D: ""}
_STYLES = re.compile(r"(\x1b\[(?:[\d;]*[AKm]|\?25[hl])|\r)")  # colours, and how rich draws a bar again


class TerminalText(io.TextIOWrapper):
    """Terminal stream that drops control characters."""

    def write(self, text: str, /) -> int:
        super().write(text.translate(_SAFE))
        return len(text)

    def write_styled(self, text: str) -> int:
        parts = _STYLES.split(text)  # matches have odd indices
        return super().write("".join(part if n % 2 else part.translate(_SAFE) for n, part in enumerate(parts)))


class _Styled:
    """Terminal stream that passes colours through."""

    def __init__(self, terminal: TerminalText) -> None:
        self._terminal, self.write = terminal, terminal.write_styled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def styled(stream: TextIO) -> TextIO:
    """Return a stream that passes colour codes on. Callers must strip such codes from untrusted text."""
    return cast(TextIO, _Styled(stream)) if isinstance(stream, TerminalText) else stream


def filter_terminals() -> None:
    """Make standard output and error drop control characters if they are terminals."""
    for name in NAMES[1:]:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            how = stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through
            setattr(sys, name, TerminalText(stream.detach(), *how))


def make_writable() -> None:
    """Replace closed streams (`>&-`) by the null device, and characters that an encoding lacks by others.

    Otherwise the next file to be opened would get a closed stream's number, and receive its output.
    """
    for number, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            setattr(sys, name, _null(number, "r" if number == 0 else "w"))
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # a test's or another program's own stream
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _null(number: int, mode: str) -> object:
    with suppress(OSError):
        os.fstat(number)
        return open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123 - the number is in use again
    opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one, since those below are open
    os.set_inheritable(opened, True)
    return os.fdopen(opened, mode, encoding="utf-8")
