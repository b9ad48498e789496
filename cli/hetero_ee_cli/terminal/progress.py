"""Progress on standard error: a bar for each stage on a terminal, a line elsewhere, and nothing for quick stages.

Prompts are read again and again. Their progress has a line of its own on a terminal, and is not shown elsewhere.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hetero_ee.config import BYTE_STAGES, READING, Progress
from hetero_ee_cli.terminal.output import printable
from hetero_ee_cli.terminal.prompt_progress import PromptProgress, duration
from hetero_ee_cli.terminal.streams import styled

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S = 10.0


@contextmanager
def stage_progress(of_each_time: bool = False) -> Iterator[Progress]:
    """Yield the function that an engine calls with (stage, done, total). If the total is 0, the stage is a message.

    `of_each_time`: whether these stages run each time. Other stages are announced as happening only once.
    """
    shown = _Bars("" if of_each_time else ", once") if sys.stderr.isatty() else _Lines(quiet=of_each_time)
    try:
        yield lambda stage, n_done, n_all: shown.update(printable(stage), n_done, n_all)  # there may be names in it
    finally:
        shown.close()


class PhaseClock:
    """Progress callback that forwards each report and measures how long each stage lasts.

    Attributes:
        seconds: for each stage, the seconds from its first to its latest report. Prefill is not included.
    """

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.perf_counter) -> None:
        self._progress, self._clock = progress, clock
        self._starts: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, n_done: int, n_all: int) -> None:
        if n_all and stage != READING:
            now_s = self._clock()
            self.seconds[stage] = now_s - self._starts.setdefault(stage, now_s)
        self._progress(stage, n_done, n_all)


class _Lines:
    """Progress in logs and pipes: one line at the beginning of each stage, and one every ten seconds."""

    def __init__(self, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._said: set[str] = set()
        self._quiet, self._clock = quiet, clock
        self._stage, self._start_s, self._n_at_start, self._line_due_s = "", 0.0, 0, 0.0

    def update(self, stage: str, n_done: int, n_all: int) -> None:
        if stage == READING:
            return
        if stage not in self._said and not self._quiet:
            self._said.add(stage)
            print(f"{stage}, once ..." if n_all else f"{stage.removesuffix('.')}.", file=sys.stderr)
        now_s = self._clock()
        if stage != self._stage or n_done == 0:
            self._stage, self._start_s, self._n_at_start = stage, now_s, n_done
            self._line_due_s = now_s + LINE_EVERY_S
        elif n_all and now_s >= self._line_due_s:
            self._line_due_s = now_s + LINE_EVERY_S
            rate, per_s = "", (n_done - self._n_at_start) / (now_s - self._start_s)
            if stage.startswith(BYTE_STAGES) and per_s > 0:
                rate = f", {per_s / 1e6:,.1f} MB/s, {duration((n_all - n_done) / per_s)} left"
            print(f"{stage}: {n_done / n_all:.0%}{rate}", file=sys.stderr)

    def close(self) -> None:
        pass


class _Bars:
    """Progress bars on terminals. rich is only imported when there is something to show."""

    def __init__(self, note: str = ", once") -> None:
        self._note = note
        self._progress: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._remarks: set[str] = set()
        self._prompt = PromptProgress()

    def update(self, stage: str, n_done: int, n_all: int) -> None:
        if stage == READING:
            self._prompt.update(n_done, n_all)
            return
        from rich.filesize import decimal

        if self._progress is None:
            self._prompt.close()  # one line at a time: the next update of the prompt shows its own again
            self._progress, self._tasks = _started(), {}
        progress, tasks = self._progress, self._tasks
        if n_all == 0:
            if stage not in self._remarks:
                self._remarks.add(stage)
                progress.console.print(f"{stage.removesuffix('.')}.", markup=False, highlight=False)
        else:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage + self._note, total=n_all, size="")
            speed = progress.tasks[tasks[stage]].speed
            size = f"{decimal(n_done)} of {decimal(n_all)}{f', {decimal(int(speed))}/s' if speed else ''}"
            progress.update(tasks[stage], completed=n_done, size=size if stage.startswith(BYTE_STAGES) else "")
        if progress.finished:  # what follows may be text, which a bar would overwrite
            self.close()

    def close(self) -> None:
        self._prompt.close()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _started() -> "RichProgress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    texts = ("{task.percentage:>3.0f}%", "{task.fields[size]}")
    stage = TextColumn("{task.description}", markup=False)
    columns = (stage, BarColumn(), *map(TextColumn, texts), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(file=styled(sys.stderr)), transient=True, redirect_stdout=False)
    progress.start()
    return progress
