"""Emulated devices and link: numbers computed on this CPU at once, time taken from a hardware profile.

They share the profile with the planner and nothing else, so that a plan's prediction can be checked against what the
executor really asks for.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.allocation import Allocation, Ledger
from hetero_ee.runtime.devices.device import CPU, GPU, Event, T
from hetero_ee.runtime.devices.timeline import COPY_LANES, ROW_LANES, Timeline
from hetero_ee.runtime.work import Work, joined_name, work_s
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile, LinkTimes


class EmulatedDevice:
    """The CPU or the GPU of a profile. The CPU is the host: its work takes the host's time, the GPU's is only begun.

    memory_bytes: that can be had there. threads: of the CPU, 0 for the most that were measured. Raises ValueError for
    a GPU that the profile does not have.
    """

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        profile: HardwareProfile,
        spec: ModelSpec,
        memory_bytes: int,
        threads: int = 0,
    ) -> None:
        self._name, self._timeline, self._spec = name, timeline, spec
        self._times = _times(name, profile, threads)
        self._disk_bytes_per_s = profile.disk_read_bytes_per_s.value
        self._memory_bytes, self._ledger = memory_bytes, Ledger(name)

    @property
    def name(self) -> str:
        return self._name

    def now_s(self) -> float:
        """See Device.now_s: virtual seconds."""
        return self._timeline.now_s

    def free_bytes(self) -> int:
        """See Device.free_bytes."""
        return self._memory_bytes - self._ledger.held_bytes

    def allocate(self, n_bytes: int, purpose: str) -> Allocation:
        """See Device.allocate."""
        return self._ledger.claim(n_bytes, purpose, self.free_bytes())

    def held_bytes(self) -> dict[str, int]:
        """See Device.held_bytes."""
        return self._ledger.by_purpose()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Device.empty: memory of this CPU."""
        return torch.empty(tuple(shape), dtype=dtype)

    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        """See Device.run. Works follow one another on the device's lane, the first once the events are reached.

        Raises KeyError for a layout that the profile has no times of; a run that raises takes no time.
        """
        seconds = [work_s(work, self._times, self._disk_bytes_per_s, self._spec) for work in works]
        value = compute()
        event = self._timeline.occupy(self._name, joined_name(works), 0.0, after)
        for work, duration_s in zip(works, seconds, strict=True):
            event = self._timeline.occupy(self._name, work.name, duration_s)
        return value, event

    def wait(self, event: Event) -> None:
        """See Device.wait."""
        self._timeline.host_wait(event)


class EmulatedLink:
    """The link of a profile. Raises ValueError for a profile without one."""

    def __init__(self, timeline: Timeline, profile: HardwareProfile) -> None:
        self._timeline, self._times = timeline, _link(profile)

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """See Link.copy: the latency, and the bytes at the rate of pinned memory."""
        rate = self._times.to_gpu_bytes_per_s if to == GPU else self._times.to_cpu_bytes_per_s
        value = compute()
        seconds = self._times.latency.value + n_bytes / rate.value
        return value, self._timeline.occupy(COPY_LANES[to], name, seconds, after)

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """See Link.transfer: what one row was measured to take, and the rest at the rate towards the CPU, the
        slower."""
        value = compute()
        seconds = self._times.transfer.value + (n_rows - 1) * row_bytes / self._times.to_cpu_bytes_per_s.value
        return value, self._timeline.occupy(ROW_LANES[to], name, seconds, after)

    def host_buffer(self, n_bytes: int) -> Tensor:
        """See Link.host_buffer."""
        return torch.empty(n_bytes, dtype=torch.uint8)


def _times(name: str, profile: HardwareProfile, threads: int) -> DeviceTimes:
    if name == CPU:
        return profile.cpu_with(threads)
    if profile.gpu is None:
        raise ValueError(f"{profile.name} has no GPU.")
    return profile.gpu


def _link(profile: HardwareProfile) -> LinkTimes:
    if profile.link is None:
        raise ValueError(f"{profile.name} has no GPU.")
    return profile.link
