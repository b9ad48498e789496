"""A GPU that torch calls cuda, and its link: launches and copies run by themselves, in streams that events order."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hetero_ee.costs.work import Work
from hetero_ee.device_errors import driver_errors
from hetero_ee.runtime.devices.cuda_driver import CudaDriver
from hetero_ee.runtime.devices.cuda_stream import CudaClock, CudaStream
from hetero_ee.runtime.devices.device import CPU, GPU, Device, Event, T
from hetero_ee.runtime.devices.timeline import COPY_LANES, ROW_LANES
from hetero_ee.runtime.work import joined_name


class CudaDevice(Device):
    """budget_bytes: the most to claim, None for all there is. trace: gets a span a run.

    Computes on the stream that torch uses anyway, so that what was made without `run` is never met half-done.
    """

    def __init__(self, driver: CudaDriver, budget_bytes: int | None = None, trace: CudaClock | None = None) -> None:
        super().__init__(GPU)
        self._driver, self._budget_bytes = driver, budget_bytes
        with driver_errors("its start", driver.free_bytes):
            self._queue = CudaStream(driver, driver.compute_stream(), GPU, trace)

    def free_bytes(self) -> int:
        """See Device.free_bytes. Claims count whether they are in use yet or not, other programs' memory as it is."""
        driver, claimed_bytes = self._driver, self.claimed_bytes
        with driver_errors("a look at its memory", lambda: 0):
            usable_bytes = driver.free_bytes() + driver.kept_bytes()
            free_bytes = usable_bytes - max(claimed_bytes, driver.used_bytes())
        if self._budget_bytes is not None:
            free_bytes = min(free_bytes, self._budget_bytes - claimed_bytes)
        return max(0, free_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with driver_errors("a buffer", self._driver.free_bytes):
            return self._driver.empty(shape, dtype)

    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        return self._queue.begin(joined_name(works), compute, after)


class CudaLink:
    """One stream for weights and one for hidden states each way: hidden states never wait for the copies in line.

    host_free_bytes: the CPU's memory that is available. `compute` must copy without blocking, between memory that was
    there before.
    """

    def __init__(self, driver: CudaDriver, host_free_bytes: Callable[[], int], trace: CudaClock | None = None) -> None:
        self._driver, self._host_free_bytes = driver, host_free_bytes
        with driver_errors("its start", driver.free_bytes):
            self._copies = self._queues(COPY_LANES, trace)
            self._transfers = self._queues(ROW_LANES, trace)

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        return self._copies[to].begin(name, compute, after)

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        return self._transfers[to].begin(name, compute, after)

    def host_buffer(self, n_bytes: int) -> Tensor:
        """See Link.host_buffer: pinned."""
        with driver_errors("a pinned buffer", self._host_free_bytes, device=CPU, n_bytes=n_bytes):
            return self._driver.pinned(n_bytes)

    def _queues(self, lanes: Mapping[str, str], trace: CudaClock | None) -> dict[str, CudaStream]:
        """For each device at the end, a stream of its own."""
        driver = self._driver
        return {to: CudaStream(driver, driver.new_stream(), lane, trace) for to, lane in lanes.items()}
