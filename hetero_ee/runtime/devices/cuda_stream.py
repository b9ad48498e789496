"""A stream of a GPU: its work runs in order, and may wait for events of other streams."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hetero_ee.device_errors import driver_errors
from hetero_ee.runtime.devices.cuda_driver import CudaDriver
from hetero_ee.runtime.devices.device import Event, T
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.trace import SpanRecorder


class CudaEvent:
    """The end of work on a GPU. `native` is the driver's event."""

    def __init__(self, native: Any, driver: CudaDriver) -> None:
        self.native, self._driver = native, driver

    def wait(self) -> None:
        with driver_errors("what it was waited for", self._driver.free_bytes):
            self.native.synchronize()


class CudaClock:
    """Converts times of a GPU's events to the host's clock. Both clocks are read once, when the GPU is idle."""

    def __init__(self, driver: CudaDriver, clock: Callable[[], float], recorder: SpanRecorder) -> None:
        self._recorder, self._origin = recorder, driver.new_event(is_timed=True)
        with driver_errors("the first event", driver.free_bytes):
            self._origin.record(driver.compute_stream())
            self._origin.synchronize()
        self._origin_s = clock()

    def record(self, lane: str, name: str, begin: Any, end: Any) -> None:
        """Record the span between two timed events."""

        def span() -> Span:
            end.synchronize()
            return Span(lane, name, self._at_s(begin), self._at_s(end))

        self._recorder.add_later(span)

    def _at_s(self, event: Any) -> float:
        return self._origin_s + float(self._origin.elapsed_time(event)) / 1e3


class CudaStream:
    """A stream of launches or copies.

    The stream keeps each `compute`, with everything that it refers to, until its work has ended. Otherwise torch would
    reuse the memory of unreferenced tensors while another stream may still read them.

    Args:
        lane: name of the stream in traces.
        clock: records spans, if given.
    """

    def __init__(self, driver: CudaDriver, stream: Any, lane: str, clock: CudaClock | None) -> None:
        self._driver, self._stream, self._lane, self._clock = driver, stream, lane, clock
        self._kept: deque[tuple[Any, object]] = deque()

    def begin(self, name: str, compute: Callable[[], T], after: Sequence[Event]) -> tuple[T, CudaEvent]:
        """Call `compute`, whose launches run after the events. Return its value and the event of its end.

        The host waits for events that are not the GPU's. Errors of `compute` are converted by driver_errors.
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
