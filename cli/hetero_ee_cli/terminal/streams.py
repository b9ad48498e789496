"""The three standard streams, made such that whatever is written or read never fails for their own sake.

What reaches a terminal has no control characters but newline and tab, whoever wrote it: a model's text and the names in
its files could else move the cursor, ring, or write to the clipboard. Pipes and files get everything as it is.
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
    """A terminal that control characters do not reach."""

    def write(self, text: str, /) -> int:
        super().write(text.translate(_SAFE))
        return len(text)

    def write_styled(self, text: str) -> int:
        parts = _STYLES.split(text)  # what matched is at odd places
        return super().write("".join(part if n % 2 else part.translate(_SAFE) for n, part in enumerate(parts)))


class _Styled:
    """The same terminal, which colours do reach."""

    def __init__(self, terminal: TerminalText) -> None:
        self._terminal, self.write = terminal, terminal.write_styled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


def styled(stream: TextIO) -> TextIO:
    """The stream for a text with colours, whose author cleans what he puts between them."""
    return cast(TextIO, _Styled(stream)) if isinstance(stream, TerminalText) else stream


def filter_terminals() -> None:
    """Makes standard output and error, where they are terminals, ones that control characters do not pass."""
    for name in NAMES[1:]:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            how = stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through
            setattr(sys, name, TerminalText(stream.detach(), *how))


def make_writable() -> None:
    """Streams that were closed (`>&-`) become the null device; characters that an encoding lacks become others.

    A closed stream's number would else be given to the next file that is opened, and receive what was meant for it.
    """
    for number, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            setattr(sys, name, _null(number, "r" if number == 0 else "w"))
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # what a test or another program has put there
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _null(number: int, mode: str) -> object:
    with suppress(OSError):
        os.fstat(number)
        return open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123 - the number is in use again
    opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this one, since those below are open
    os.set_inheritable(opened, True)
    return os.fdopen(opened, mode, encoding="utf-8")
