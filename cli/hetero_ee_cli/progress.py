"""Progress on standard error: a bar on a terminal, one line elsewhere, nothing where nothing is converted."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def conversion_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields what Engine.from_pretrained calls while it converts; the bar appears at the first call."""
    bar = _Bar() if sys.stderr.isatty() else _Line()
    try:
        yield bar.update
    finally:
        bar.close()


class _Line:
    """For logs and pipes: says once that a conversion runs."""

    def __init__(self) -> None:
        self._said = False

    def update(self, tensor: str, n_done: int, n_weights: int) -> None:
        if not self._said:
            print(f"Converting {n_weights / 1e6:,.0f} M weights to int4, once for this model.", file=sys.stderr)
            self._said = True

    def close(self) -> None:
        pass


class _Bar:
    """For terminals; rich is imported only when there is something to show."""

    def __init__(self) -> None:
        self._close: Callable[[], None] = lambda: None
        self._advance: Callable[[int, int], None] | None = None

    def update(self, tensor: str, n_done: int, n_weights: int) -> None:
        if self._advance is None:
            self._start(n_weights)
        assert self._advance is not None
        self._advance(n_done, n_weights)

    def close(self) -> None:
        self._close()

    def _start(self, n_weights: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("Converting to int4, once for this model"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
        )
        progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        task = progress.add_task("", total=n_weights)
        progress.start()
        self._close = progress.stop
        self._advance = lambda n_done, total: progress.update(task, completed=n_done, total=total)
