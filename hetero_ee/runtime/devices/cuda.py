"""A GPU that torch calls cuda, and its link. Work and copies are asynchronous, in streams ordered by events."""

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
    """A CUDA or ROCm GPU.

    It computes on torch's current stream, so that tensors made without `run` are complete when they are read.

    Args:
        budget_bytes: maximum bytes of claims; None for all memory.
        trace: records a span per run, if given.
    """

    def __init__(self, driver: CudaDriver, budget_bytes: int | None = None, trace: CudaClock | None = None) -> None:
        super().__init__(GPU)
        self._driver, self._budget_bytes = driver, budget_bytes
        with driver_errors("its start", driver.free_bytes):
            self._queue = CudaStream(driver, driver.compute_stream(), GPU, trace)

    def free_bytes(self) -> int:
        """Return the memory that can still be claimed, less unused claims and other programs' memory."""
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
    """The link of a GPU, with separate streams for weights and for hidden states in each direction.

    So hidden states never wait for queued weights. `compute` must copy without blocking, between existing memory.

    Args:
        host_free_bytes: returns the free memory of the CPU, for error messages.
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
        with driver_errors("a pinned buffer", self._host_free_bytes, device=CPU, n_bytes=n_bytes):
            return self._driver.pinned(n_bytes)

    def _queues(self, lanes: Mapping[str, str], trace: CudaClock | None) -> dict[str, CudaStream]:
        """Make a stream for each target device. `lanes`: names in traces, by device."""
        driver = self._driver
        return {to: CudaStream(driver, driver.new_stream(), lane, trace) for to, lane in lanes.items()}
