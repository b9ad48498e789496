"""How far a long prompt is read: a line on a terminal's standard error while it takes more than a second."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetero_ee.config import READING
from hetero_ee_cli.terminal.streams import styled

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

SHOWN_AFTER_S = 1.0
REFRESHES_PER_S = 4.0


class PromptProgress:
    """One prompt after the other. The line is drawn by a thread of rich's, and erased when the prompt is read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: Live | None = None
        self._n_done, self._n_all = 0, 0
        self._start_s, self._told_s = 0.0, 0.0
        self._token_s = 0.0  # of the latest chunk: later ones see more, and take longer

    def update(self, n_done: int, n_all: int) -> None:
        """So many tokens of so many are read; the first call of a prompt begins it."""
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
        if self._live is None:
            self._live = self._started()
        else:
            self._live.refresh()

    def close(self) -> None:
        """Takes the line away until the next update."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> str:
        """What is shown now: nothing at first."""
        now_s = self._clock()
        if now_s - self._start_s < SHOWN_AFTER_S:
            return ""
        line = f"{READING}: {self._n_done:,} of {self._n_all:,} tokens"
        if self._n_done == 0 or self._told_s <= self._start_s:
            return line
        rate = self._n_done / (self._told_s - self._start_s)
        left_s = max(1.0, (self._n_all - self._n_done) * self._token_s - (now_s - self._told_s))
        return f"{line}, {rate:,.{0 if rate >= 10 else 1}f} tokens/s, {_duration(left_s)} left"

    def _text(self) -> "Text":
        from rich.text import Text

        return Text(self.line(), no_wrap=True, overflow="ellipsis")

    def _started(self) -> "Live":
        from rich.console import Console
        from rich.live import Live

        console = Console(file=styled(sys.stderr))
        live = Live(
            get_renderable=self._text,
            console=console,
            transient=True,
            redirect_stdout=False,
            refresh_per_second=REFRESHES_PER_S,
        )
        live.start()
        return live


def _duration(seconds: float) -> str:
    """`12 s`, `3 min 05 s`, `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02} min"
