"""One stream of a GPU: work that runs in order, each piece after the events it was given."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hetero_ee.device_errors import driver_errors
from hetero_ee.runtime.devices.cuda_driver import CudaDriver
from hetero_ee.runtime.devices.device import Event, T
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.trace import SpanRecorder


class CudaEvent:
    """An event that the GPU reaches by itself. native: the driver's."""

    def __init__(self, native: Any, driver: CudaDriver) -> None:
        self.native, self._driver = native, driver

    def wait(self) -> None:
        """See Event.wait."""
        with driver_errors("what it was waited for", self._driver.free_bytes):
            self.native.synchronize()


class CudaClock:
    """Puts spans of a GPU on the host's clock: both are read once, when nothing runs."""

    def __init__(self, driver: CudaDriver, clock: Callable[[], float], recorder: SpanRecorder) -> None:
        self._recorder, self._origin = recorder, driver.new_event(is_timed=True)
        with driver_errors("the first event", driver.free_bytes):
            self._origin.record(driver.compute_stream())
            self._origin.synchronize()
        self._origin_s = clock()

    def record(self, lane: str, name: str, begin: Any, end: Any) -> None:
        """The span between two timed events."""

        def span() -> Span:
            end.synchronize()
            return Span(lane, name, self._at_s(begin), self._at_s(end))

        self._recorder.add_later(span)

    def _at_s(self, event: Any) -> float:
        return self._origin_s + float(self._origin.elapsed_time(event)) / 1e3


class CudaStream:
    """lane: what its spans are recorded as, where there is a clock for them.

    What a `compute` holds is kept until its event is reached: torch would give the memory of a tensor that nobody names
    any more to the next one, which another stream may be reading still.
    """

    def __init__(self, driver: CudaDriver, stream: Any, lane: str, clock: CudaClock | None) -> None:
        self._driver, self._stream, self._lane, self._clock = driver, stream, lane, clock
        self._kept: deque[tuple[Any, object]] = deque()

    def begin(self, name: str, compute: Callable[[], T], after: Sequence[Event]) -> tuple[T, CudaEvent]:
        """Launches what `compute` launches, to run after the events; what it returned, and the event of its end.

        Events of other devices are waited for here. Raises what `compute` raises, see driver_errors.
        """
        others = [event for event in after if not isinstance(event, CudaEvent)]
        for event in others:
            event.wait()
        with driver_errors(name, self._driver.free_bytes), self._driver.on_stream(self._stream):
            for event in after:
                if isinstance(event, CudaEvent):
                    self._stream.wait_event(event.native)
            begin = self._recorded() if self._clock else None
            value = compute()
            end = self._recorded()
            self._keep(end, compute)
        if self._clock:
            self._clock.record(self._lane, name, begin, end)
        return value, CudaEvent(end, self._driver)

    def _keep(self, end: Any, compute: object) -> None:
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        self._kept.append((end, compute))

    def _recorded(self) -> Any:
        event = self._driver.new_event(is_timed=self._clock is not None)
        event.record(self._stream)
        return event
