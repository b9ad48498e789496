"""Progress of a long prompt: a line on a terminal's standard error after one second of reading."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hetero_ee.config import READING
from hetero_ee_cli.terminal.streams import styled

SHOWN_AFTER_S = 1.0
DRAWN_EVERY_S = 0.25
USUAL_COLUMNS = 80


class PromptProgress:
    """Progress of one prompt after the other. A thread redraws the line, and erases it when the prompt is read.

    Most prompts need less than a second. rich's bars would cost these 40 ms of imports (AMD EPYC Milan, 2026-11-23).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawing: threading.Thread | None = None
        self._is_over = threading.Event()
        self._n_done, self._n_all = 0, 0
        self._start_s, self._told_s = 0.0, 0.0
        self._token_s = 0.0  # of the latest chunk; later chunks attend to more tokens

    def update(self, n_done: int, n_all: int) -> None:
        """Record the number of tokens read. The first call for a prompt starts its timer."""
        if n_done >= n_all:
            self.close()
            return
        now_s, n_before = self._clock(), self._n_done
        self._n_done, self._n_all = n_done, n_all
        if n_done > n_before:
            self._token_s = (now_s - self._told_s) / (n_done - n_before)
        self._told_s = now_s
        if n_done == 0:
            self._start_s = now_s
        if self._drawing is None:
            self._is_over = threading.Event()
            drawing = threading.Thread(target=self._draw, args=(self._is_over,), name="prompt progress", daemon=True)
            with suppress(RuntimeError):  # the system lends no more threads: the prompt is read all the same
                drawing.start()
                self._drawing = drawing

    def close(self) -> None:
        """Erase the line until the next update."""
        self._is_over.set()
        if self._drawing is not None:
            self._drawing.join()
            self._drawing = None

    def line(self) -> str:
        """Return the current line, which is empty at first."""
        now_s = self._clock()
        if now_s - self._start_s < SHOWN_AFTER_S:
            return ""
        line = f"{READING}: {self._n_done:,} of {self._n_all:,} tokens"
        if self._n_done == 0 or self._told_s <= self._start_s:
            return line
        rate = self._n_done / (self._told_s - self._start_s)
        left_s = max(1.0, (self._n_all - self._n_done) * self._token_s - (now_s - self._told_s))
        return f"{line}, {rate:,.{0 if rate >= 10 else 1}f} tokens/s, {duration(left_s)} left"

    def _draw(self, is_over: threading.Event) -> None:
        n_shown, write = 0, styled(sys.stderr).write
        while not is_over.wait(DRAWN_EVERY_S):
            line = self.line()[: _columns() - 1]
            write(f"\r{line:{n_shown}}" if line else "")
            n_shown = len(line)
            sys.stderr.flush()
        write(f"\r{'':{n_shown}}\r" if n_shown else "")
        sys.stderr.flush()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):  # a standard error that no file is behind
        return USUAL_COLUMNS


def duration(seconds: float) -> str:
    """Return the time as `12 s`, `3 min 05 s` or `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02} min"
