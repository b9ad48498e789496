"""A discrete-event clock: what runs when on the CPU, the GPU and each direction of the link, in virtual seconds.

Weights and hidden states have lanes of their own: on a GPU they go in streams of their own, weights in small pieces, so
that hidden states never wait for the copies in line. What the two take from each other is not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_ee.runtime.devices.device import CPU, GPU, Event

TO_GPU, TO_CPU = "to_gpu", "to_cpu"  # weights, keys and values
ROWS_TO_GPU, ROWS_TO_CPU = "rows_to_gpu", "rows_to_cpu"
LANES = (CPU, GPU, ROWS_TO_GPU, ROWS_TO_CPU, TO_GPU, TO_CPU)
COPY_LANES, ROW_LANES = {GPU: TO_GPU, CPU: TO_CPU}, {GPU: ROWS_TO_GPU, CPU: ROWS_TO_CPU}  # by the device at the end


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane was busy with, from start_s to end_s."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Begins at 0. Each lane does one thing at a time, in the order of the calls. The CPU's lane is the host.

    spans: everything that took time, in the order of the calls.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._free_s = dict.fromkeys(LANES, 0.0)

    @property
    def now_s(self) -> float:
        """Where the host is."""
        return self._free_s[CPU]

    def occupy(
        self, lane: str, name: str, seconds: float, after: Iterable[Event] = (), not_before_s: float = 0.0
    ) -> "Moment":
        """Runs something of that length as soon as the host has asked for it, the lane is free and the events are
        reached; the event of its end. On the CPU's lane the host goes along. Raises ValueError below 0 seconds.
        """
        if not seconds >= 0:
            raise ValueError(f"{name} takes {seconds} s, expected 0 or more.")
        reached_s = [self._time_s(event) for event in after]
        start_s = max(self._free_s[lane], self.now_s, not_before_s, *reached_s)
        self._free_s[lane] = start_s + seconds
        if seconds:
            self.spans.append(Span(lane, name, start_s, start_s + seconds))
        return Moment(start_s + seconds, self)

    def host_wait(self, event: Event) -> None:
        """The host does nothing until the event is reached."""
        self._free_s[CPU] = max(self.now_s, self._time_s(event))

    def _time_s(self, event: Event) -> float:
        if not isinstance(event, Moment) or event.timeline is not self:
            raise TypeError(f"{event!r} is no event of this time line.")
        return event.time_s


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of a time line, reached at time_s."""

    time_s: float
    timeline: Timeline

    def wait(self) -> None:
        self.timeline.host_wait(self)
