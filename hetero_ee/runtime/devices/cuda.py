"""A GPU that torch calls cuda, and its link: launches and copies run by themselves, in streams that events order."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hetero_ee.runtime.devices.allocation import Allocation, Ledger
from hetero_ee.runtime.devices.cuda_driver import CudaDriver
from hetero_ee.runtime.devices.cuda_errors import driver_errors
from hetero_ee.runtime.devices.cuda_stream import CudaClock, CudaStream
from hetero_ee.runtime.devices.device import CPU, GPU, Event, T
from hetero_ee.runtime.devices.timeline import COPY_LANES, ROW_LANES
from hetero_ee.runtime.work import Work, joined_name


class CudaDevice:
    """clock: seconds, monotonic. budget_bytes: the most to claim, None for all there is. trace: gets a span a run.

    Computes on the stream that torch uses anyway, so that what was made without `run` is never met half-done.
    """

    name = GPU

    def __init__(
        self,
        driver: CudaDriver,
        clock: Callable[[], float],
        budget_bytes: int | None = None,
        trace: CudaClock | None = None,
    ) -> None:
        self._driver, self._clock, self._budget_bytes = driver, clock, budget_bytes
        self._ledger = Ledger(GPU)
        with driver_errors("its start", driver.free_bytes):
            self._queue = CudaStream(driver, driver.compute_stream(), GPU, trace)

    def now_s(self) -> float:
        """See Device.now_s."""
        return self._clock()

    def free_bytes(self) -> int:
        """See Device.free_bytes. Claims count whether they are in use yet or not, other programs' memory as it is."""
        driver, held_bytes = self._driver, self._ledger.held_bytes
        with driver_errors("a look at its memory", lambda: 0):
            usable_bytes = driver.free_bytes() + driver.kept_bytes()
            free_bytes = usable_bytes - max(held_bytes, driver.used_bytes())
        if self._budget_bytes is not None:
            free_bytes = min(free_bytes, self._budget_bytes - held_bytes)
        return max(0, free_bytes)

    def allocate(self, n_bytes: int, purpose: str) -> Allocation:
        """See Device.allocate."""
        return self._ledger.claim(n_bytes, purpose, self.free_bytes())

    def held_bytes(self) -> dict[str, int]:
        """See Device.held_bytes."""
        return self._ledger.by_purpose()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Device.empty."""
        with driver_errors("a buffer", self._driver.free_bytes):
            return self._driver.empty(shape, dtype)

    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        """See Device.run."""
        return self._queue.begin(joined_name(works), compute, after)

    def wait(self, event: Event) -> None:
        """See Device.wait."""
        event.wait()


class CudaLink:
    """One stream for weights and one for hidden states each way: rows never wait behind the copies in line.

    host_free_bytes: memory of the CPU that can be had. `compute` must copy without blocking, between memory that was
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
        """See Link.copy."""
        return self._copies[to].begin(name, compute, after)

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """See Link.transfer."""
        return self._transfers[to].begin(name, compute, after)

    def host_buffer(self, n_bytes: int) -> Tensor:
        """See Link.host_buffer: pinned."""
        with driver_errors("a pinned buffer", self._host_free_bytes, device=CPU, n_bytes=n_bytes):
            return self._driver.pinned(n_bytes)

    def _queues(self, lanes: Mapping[str, str], trace: CudaClock | None) -> dict[str, CudaStream]:
        """For each device at the end, a stream of its own."""
        driver = self._driver
        return {to: CudaStream(driver, driver.new_stream(), lane, trace) for to, lane in lanes.items()}
