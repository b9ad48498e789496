"""Ctrl-C and SIGTERM become exceptions, so that partly written files are removed, and then exit codes."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


def raise_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process at once if a signal arrives inside the block. Used for imports, which need no cleanup.

    An exception during the import of torch makes its C++ code abort, or is lost and leaves numpy half imported. Does
    nothing in other threads: only the main thread receives signals and may set handlers.

    The garbage collector pauses, and scans what was imported only at exit, where Triton complains of objects that are
    left: a start takes 0.4 s less (AMD EPYC, 2026-11-28).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    codes: dict[int, int] = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
    before = {number: signal.signal(number, lambda number, _: os._exit(codes[number])) for number in codes}
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """End the process at once and silently, after flushing the output as far as possible.

    sys.exit would flush again and report errors. If Ctrl-C arrived during an exec(), which happens often while torch is
    imported, Python would end with the signal instead of the code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
