"""The three standard streams, made such that whatever is written or read never fails for their own sake."""

import os
import sys
from contextlib import suppress

NAMES = ("stdin", "stdout", "stderr")


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
