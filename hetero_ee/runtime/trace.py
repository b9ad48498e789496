"""Writes traces of devices and link over time as Chrome's JSON, for chrome://tracing and Perfetto."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero_ee.errors import DiskFullError, UsageError
from hetero_ee.hub.regular_file import reason_of
from hetero_ee.runtime.devices.device import CPU, GPU
from hetero_ee.runtime.devices.timeline import LANES, ROWS_TO_CPU, ROWS_TO_GPU, TO_CPU, TO_GPU, Span
from hetero_ee.weights.store.filesystem import FULL
from hetero_ee_profiles.records import write_whole

PROCESS = 1
TITLES = {
    CPU: "CPU",
    GPU: "GPU",
    ROWS_TO_GPU: "hidden states to GPU",
    ROWS_TO_CPU: "hidden states to CPU",
    TO_GPU: "weights to GPU",
    TO_CPU: "keys and values to CPU",
}
MICROSECONDS = 1e6


class SpanRecorder:
    """Collects spans of work of real devices."""

    def __init__(self) -> None:
        self._found: list[Callable[[], Span]] = []

    def add(self, span: Span) -> None:
        self._found.append(lambda: span)

    def add_later(self, span: Callable[[], Span]) -> None:
        """Add a span that is not finished yet. `span` is called for its times when spans are requested."""
        self._found.append(span)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Return a context whose spans are dropped at its end."""
        n_before = len(self._found)
        try:
            yield
        finally:
            del self._found[n_before:]

    def spans(self) -> list[Span]:
        """Return all spans, ordered by start time. All work must have finished."""
        return sorted((span() for span in self._found), key=lambda span: span.start_s)


def write_trace(file: Path, spans: Iterable[Span], title: str) -> None:
    """Write the spans to `file`, completely or not at all, under this title.

    Raises:
        UsageError: if the file can't be written.
        DiskFullError: if its disk is full.
    """
    text = json.dumps({"traceEvents": [*_names(title), *map(_event, spans)], "displayTimeUnit": "ms"})
    target = file.resolve()
    if target.exists() and not target.is_file():
        raise UsageError(f"the trace can't be written to {file}, which is not a regular file; name another one.")
    try:
        write_whole(text, target)
    except OSError as error:
        if error.errno in FULL:
            raise DiskFullError(
                f"the disk of {file} has no room for a trace of {len(text) / 2**20:.1f} MiB; free some or name a file "
                "on another disk."
            ) from error
        raise UsageError(f"the trace can't be written to {file} ({reason_of(error)}); name another file.") from error


def _names(title: str) -> Iterator[dict[str, Any]]:
    """Yield the events that give the process and its lanes their names and order."""
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": title}}
    for thread, lane in enumerate(LANES):
        place = {"ph": "M", "pid": PROCESS, "tid": thread}
        yield {**place, "name": "thread_name", "args": {"name": TITLES[lane]}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _event(span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": PROCESS,
        "tid": LANES.index(span.lane),
        "ts": span.start_s * MICROSECONDS,
        "dur": (span.end_s - span.start_s) * MICROSECONDS,
    }
