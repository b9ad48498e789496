"""torch.cuda's place in the runtime: streams and events that record who waits for whom, memory that is scripted."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"


class StandInStream:
    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self._log = name, log

    def wait_event(self, event: "StandInEvent") -> None:
        self._log.append((self.name, "waits for", event.name))


class StandInEvent:
    def __init__(self, driver: "StandInCuda", name: str, is_timed: bool) -> None:
        self.name, self._driver, self._is_timed = name, driver, is_timed
        self.time_ms, self.is_reached = 0.0, False

    def query(self) -> bool:
        return self.is_reached

    def record(self, stream: StandInStream) -> None:
        self._driver.called("record")
        self.time_ms = self._driver.gpu_ms
        self._driver.log.append((stream.name, "records", self.name))

    def synchronize(self) -> None:
        self._driver.called("synchronize")
        self._driver.log.append(("host", "waits for", self.name))
        self.is_reached = True

    def elapsed_time(self, later: "StandInEvent") -> float:
        if not (self._is_timed and later._is_timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return later.time_ms - self.time_ms


class StandInCuda:
    """log: (who, what, event or launch). free, kept, used: bytes that it tells. fail: method that raises `error`."""

    def __init__(self, free_bytes: int = 2**20, fail: str = "", error: Exception | None = None) -> None:
        self.free, self.kept, self.used = free_bytes, 0, 0
        self.log: list[tuple[str, ...]] = []
        self.gpu_ms = 0.0
        self.fail, self.error = fail, error or RuntimeError(ILLEGAL)
        self._current = StandInStream("compute", self.log)
        self._n_streams = self._n_events = 0

    def called(self, name: str) -> None:
        if self.fail == name:
            raise self.error

    def launch(self, name: str, milliseconds: float = 0.0) -> None:
        """What a kernel or copy does: it goes to the current stream."""
        self.gpu_ms += milliseconds
        self.log.append((self._current.name, "runs", name))

    def compute_stream(self) -> Any:
        return self._current

    def new_stream(self) -> Any:
        self.called("new_stream")
        self._n_streams += 1
        return StandInStream(f"stream {self._n_streams}", self.log)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._on(stream)

    @contextmanager
    def _on(self, stream: StandInStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_event(self, *, is_timed: bool) -> Any:
        self._n_events += 1
        return StandInEvent(self, f"event {self._n_events}", is_timed)

    def free_bytes(self) -> int:
        self.called("free_bytes")
        return self.free

    def kept_bytes(self) -> int:
        return self.kept

    def used_bytes(self) -> int:
        return self.used

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.called("empty")
        return torch.empty(tuple(shape), dtype=dtype)

    def pinned(self, n_bytes: int) -> Tensor:
        self.called("pinned")
        return torch.empty(n_bytes, dtype=torch.uint8)
