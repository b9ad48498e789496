"""A machine that is not there: numbers computed on this CPU at once, time taken from a hardware profile.

They share the profile with the planner and nothing else, so that a plan's prediction can be checked against what the
executor really asks for.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.costs.work import Work
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.device import CPU, GPU, Device, Event, T
from hetero_ee.runtime.devices.machine import CpuCopier, Machine
from hetero_ee.runtime.devices.timeline import COPY_LANES, ROW_LANES, Timeline
from hetero_ee.runtime.streaming.block_source import MappedBlocks
from hetero_ee.runtime.work import joined_name
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile, LinkTimes


class EmulatedDevice(Device):
    """The CPU or the GPU of a profile. The CPU is the host: its work takes the host's time, the GPU's is only begun.

    memory_bytes: available there. threads: of the CPU, 0 for the most that were measured. Raises ValueError for
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
        super().__init__(name)
        self._timeline, self._spec = timeline, spec
        self._times = _times(name, profile, threads)
        self._disk_bytes_per_s = profile.disk_read_bytes_per_s.value
        self._memory_bytes = memory_bytes

    def free_bytes(self) -> int:
        return self._memory_bytes - self.claimed_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Device.empty: memory of this CPU."""
        return torch.empty(tuple(shape), dtype=dtype)

    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        """See Device.run. Works follow one another on the device's lane, the first once the events are reached.

        Raises KeyError for a layout that the profile has no times of; a run that raises takes no time.
        """
        seconds = [work.seconds(self._times, self._disk_bytes_per_s, self._spec) for work in works]
        value = compute()
        event = self._timeline.occupy(self.name, joined_name(works), 0.0, after)
        for work, duration_s in zip(works, seconds, strict=True):
            event = self._timeline.occupy(self.name, work.name, duration_s)
        return value, event


class EmulatedLink:
    """The link of a profile. row_bytes: of one token's hidden state, whose transfer was measured. beside_cpu: names of
    what is copied while the CPU reads weights of its own, from the same RAM.

    Raises ValueError for a profile without a link.
    """

    def __init__(
        self, timeline: Timeline, profile: HardwareProfile, row_bytes: int, beside_cpu: Collection[str] = frozenset()
    ) -> None:
        self._timeline, self._times = timeline, _link(profile)
        self._row_bytes, self._beside_cpu = row_bytes, beside_cpu

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """See Link.copy: the latency, and the bytes at the rate of pinned memory."""
        rate = self._times.to_gpu_bytes_per_s if to == GPU else self._times.to_cpu_bytes_per_s
        if to == GPU and name in self._beside_cpu:
            rate = self._times.beside_cpu_bytes_per_s
        value = compute()
        seconds = self._times.latency.value + n_bytes / rate.value
        return value, self._timeline.occupy(COPY_LANES[to], name, seconds, after)

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """See Link.transfer: what a hidden state was measured to take, what is beyond its bytes at the rate towards
        the CPU, the slower."""
        value = compute()
        more_bytes = max(0, n_rows * row_bytes - self._row_bytes)
        seconds = self._times.transfer.value + more_bytes / self._times.to_cpu_bytes_per_s.value
        return value, self._timeline.occupy(ROW_LANES[to], name, seconds, after)

    def host_buffer(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)


class EmulatedGpuTensor(Tensor):
    """A tensor of the CPU that counts as one of the emulated GPU; what is computed from it counts as that too."""


class EmulatedCopier:
    """Of an emulated GPU, whose tensors are the CPU's under another name."""

    def is_on_gpu(self, x: Tensor) -> bool:
        return isinstance(x, EmulatedGpuTensor)

    def to_gpu(self, x: Tensor) -> Tensor:
        return x.as_subclass(EmulatedGpuTensor)

    def to_cpu(self, x: Tensor) -> Tensor:
        return x.as_subclass(Tensor)


def emulated_machine(profile: HardwareProfile, spec: ModelSpec, plan: Plan, timeline: Timeline) -> Machine:
    """The profile's machine with the plan's budgets and threads, from where the time line is."""
    cpu = EmulatedDevice(CPU, timeline, profile, spec, plan.ram_budget_bytes, plan.threads)
    if profile.gpu is None or not plan.n_bytes(GPU):
        return Machine(cpu, None, None, CpuCopier())
    gpu = EmulatedDevice(GPU, timeline, profile, spec, plan.vram_budget_bytes)
    link = EmulatedLink(timeline, profile, spec.hidden_size * FLOAT_BYTES, _copied_beside_cpu(plan))
    return Machine(cpu, gpu, link, EmulatedCopier(), MappedBlocks)


def _copied_beside_cpu(plan: Plan) -> frozenset[str]:
    """What is streamed for each token while other layers' weights are read by the CPU."""
    layers = [part for part in plan.parts if part.layer is not None]
    if all(part.decode_placement in ("gpu", "stream") for part in layers):
        return frozenset()
    return frozenset(part.name for part in layers if part.decode_placement == "stream")


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
