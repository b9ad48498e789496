"""The CPU as a device, timed by the wall clock."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetero_ee.costs.work import Work
from hetero_ee.device_errors import memory_error
from hetero_ee.runtime.devices.device import CPU, Device, Event, T
from hetero_ee.runtime.devices.machine import CpuCopier, Machine
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.trace import SpanRecorder
from hetero_ee.runtime.work import joined_name
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.host.memory import memory_info

REFUSAL = "can't allocate memory"  # in the RuntimeError of torch's allocator


class Reached:
    def wait(self) -> None:
        return


class CpuDevice(Device):
    """The CPU, whose work is finished when `run` returns.

    Args:
        clock: returns monotonic seconds.
        available_bytes: returns the memory that the system could still give this process.
        recorder: records a span per run, if given.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        available_bytes: Callable[[], int],
        recorder: SpanRecorder | None = None,
    ) -> None:
        self._clock, self._available_bytes, self._recorder = clock, available_bytes, recorder
        super().__init__(CPU)
        self._capacity_bytes = available_bytes()

    def free_bytes(self) -> int:
        """Return the memory that can still be claimed, less unused claims and other programs' memory."""
        return max(0, min(self._available_bytes(), self._capacity_bytes - self.claimed_bytes))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        n_bytes = torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel()
        return self._answered("A buffer", n_bytes, lambda: torch.empty(tuple(shape), dtype=dtype))

    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        for event in after:
            event.wait()
        start_s = self._clock()
        value = self._answered(joined_name(works), None, compute)
        if self._recorder is not None:
            self._recorder.add(Span(CPU, joined_name(works), start_s, self._clock()))
        return value, Reached()

    def _answered(self, purpose: str, n_bytes: int | None, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or REFUSAL in str(error):
                raise memory_error(CPU, purpose, n_bytes, self.free_bytes()) from error
            raise


def host_machine(
    clock: Callable[[], float] = time.perf_counter, recorder: SpanRecorder | None = None, held_bytes: int = 0
) -> Machine:
    """Return this computer as a machine without a GPU.

    Args:
        held_bytes: memory of loaded weights. It counts as free, since the plan claims it again.
    """
    device = CpuDevice(clock, lambda: memory_info(this_host()).available_bytes + held_bytes, recorder)
    return Machine(device, None, None, CpuCopier())
