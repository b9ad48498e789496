"""A virtual clock in seconds for the CPU, the GPU and each direction of the link.

Weights and hidden states have separate lanes, as they have separate streams on a GPU. A real link copies weights in
small pieces, so that hidden states never wait for queued copies. That both share its bandwidth is not modelled.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hetero_ee.runtime.devices.device import CPU, GPU, Event

TO_GPU, TO_CPU = "to_gpu", "to_cpu"  # weights, keys and values
ROWS_TO_GPU, ROWS_TO_CPU = "rows_to_gpu", "rows_to_cpu"
LANES = (CPU, GPU, ROWS_TO_GPU, ROWS_TO_CPU, TO_GPU, TO_CPU)
COPY_LANES, ROW_LANES = {GPU: TO_GPU, CPU: TO_CPU}, {GPU: ROWS_TO_GPU, CPU: ROWS_TO_CPU}  # by target device


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a lane from start_s to end_s."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Virtual times that begin at 0. Each lane does one thing at a time, in call order. The CPU's lane is the host.

    Attributes:
        spans: all work with a duration, in call order.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._free_s = dict.fromkeys(LANES, 0.0)

    @property
    def now_s(self) -> float:
        """Current time of the host."""
        return self._free_s[CPU]

    def occupy(
        self, lane: str, name: str, seconds: float, after: Iterable[Event] = (), not_before_s: float = 0.0
    ) -> "Moment":
        """Add work to a lane and return the event of its end.

        The work starts when the lane is free, the host has come to this call and the events are reached. Work on the
        CPU's lane also advances the host.

        Raises:
            ValueError: if seconds is negative.
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
        """Advance the host's time to that of the event, unless it is later already."""
        self._free_s[CPU] = max(self.now_s, self._time_s(event))

    def _time_s(self, event: Event) -> float:
        if not isinstance(event, Moment) or event.timeline is not self:
            raise TypeError(f"{event!r} is not an event of this timeline.")
        return event.time_s


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of a timeline, reached at time_s."""

    time_s: float
    timeline: Timeline

    def wait(self) -> None:
        self.timeline.host_wait(self)
