"""Progress on standard error: a bar a stage on a terminal, a line elsewhere, nothing where nothing takes long."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields what Engine.from_pretrained calls with (stage, done, in all); a bar appears at its stage's first call."""
    shown = _Bars() if sys.stderr.isatty() else _Lines()
    try:
        yield shown.update
    finally:
        shown.close()


class _Lines:
    """For logs and pipes: says once of each stage that it runs."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def update(self, stage: str, n_done: int, n_all: int) -> None:
        if stage not in self._said:
            self._said.add(stage)
            print(f"{stage}, once ...", file=sys.stderr)

    def close(self) -> None:
        pass


class _Bars:
    """For terminals; rich is imported only when there is something to show."""

    def __init__(self) -> None:
        self._close: Callable[[], None] = lambda: None
        self._advance: Callable[[str, int, int], None] | None = None

    def update(self, stage: str, n_done: int, n_all: int) -> None:
        if self._advance is None:
            self._start()
        assert self._advance is not None
        self._advance(stage, n_done, n_all)

    def close(self) -> None:
        self._close()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}, once"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        tasks: dict[str, int] = {}

        def advance(stage: str, n_done: int, n_all: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=n_all)
            progress.update(tasks[stage], completed=n_done)  # type: ignore[arg-type]

        progress.start()
        self._close, self._advance = progress.stop, advance
