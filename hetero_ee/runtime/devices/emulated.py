"""An emulated machine: this CPU computes everything, while a virtual clock advances as in a hardware profile.

It shares only the profile and the cost description (hetero_ee/costs) with the planner. So predictions can be checked
against the steps that an executor takes.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.costs.work import Work
from hetero_ee.layers.moe import MoeSpec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.device import CPU, GPU, Device, Event, T
from hetero_ee.runtime.devices.machine import CpuCopier, Machine
from hetero_ee.runtime.devices.timeline import COPY_LANES, ROW_LANES, Timeline
from hetero_ee.runtime.streaming.block_source import MappedBlocks
from hetero_ee.runtime.work import joined_name
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile, LinkTimes


class EmulatedDevice(Device):
    """The CPU or the GPU of a profile. The host waits for the CPU's work but not for the GPU's.

    Args:
        memory_bytes: memory of the device.
        threads: threads of the CPU; 0 for the largest number that was measured.

    Raises:
        ValueError: for a GPU if the profile has none.
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
        return torch.empty(tuple(shape), dtype=dtype)

    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        """Run `compute` and advance the clock: the works follow each other on the device's lane, after the events.

        Raises:
            KeyError: if the profile has no time for a layout. A run that raises takes no time.
        """
        seconds = [work.seconds(self._times, self._disk_bytes_per_s, self._spec) for work in works]
        value = compute()
        event = self._timeline.occupy(self.name, joined_name(works), 0.0, after)
        for work, duration_s in zip(works, seconds, strict=True):
            event = self._timeline.occupy(self.name, work.name, duration_s)
        return value, event


class EmulatedLink:
    """The link of a profile.

    Args:
        row_bytes: bytes of one token's hidden state, whose transfer was measured.
        beside_cpu: names of blocks that are copied while the CPU reads weights from the same RAM.

    Raises:
        ValueError: if the profile has no link.
    """

    def __init__(
        self, timeline: Timeline, profile: HardwareProfile, row_bytes: int, beside_cpu: Collection[str] = frozenset()
    ) -> None:
        self._timeline, self._times = timeline, _link(profile)
        self._row_bytes, self._beside_cpu = row_bytes, beside_cpu

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Copy as in Link.copy. The time is the link's latency, plus the bytes at the rate of pinned memory."""
        rate = self._times.to_gpu_bytes_per_s if to == GPU else self._times.to_cpu_bytes_per_s
        if to == GPU and name in self._beside_cpu:
            rate = self._times.beside_cpu_bytes_per_s
        value = compute()
        seconds = self._times.latency.value + n_bytes / rate.value
        return value, self._timeline.occupy(COPY_LANES[to], name, seconds, after)

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Transfer as in Link.transfer. Bytes beyond one hidden state's measured time cost the rate to the CPU."""
        value = compute()
        more_bytes = max(0, n_rows * row_bytes - self._row_bytes)
        seconds = self._times.transfer.value + more_bytes / self._times.to_cpu_bytes_per_s.value
        return value, self._timeline.occupy(ROW_LANES[to], name, seconds, after)

    def host_buffer(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)


class EmulatedGpuTensor(Tensor):
    """A CPU tensor that counts as being on the emulated GPU, as do all tensors computed from it."""


class EmulatedCopier:
    """The copier of an emulated GPU, which only changes the type of tensors."""

    def is_on_gpu(self, x: Tensor) -> bool:
        return isinstance(x, EmulatedGpuTensor)

    def to_gpu(self, x: Tensor) -> Tensor:
        return x.as_subclass(EmulatedGpuTensor)

    def to_cpu(self, x: Tensor) -> Tensor:
        return x.as_subclass(Tensor)


def emulated_machine(profile: HardwareProfile, spec: ModelSpec, plan: Plan, timeline: Timeline) -> Machine:
    """Return a machine like the profile's, with the plan's budgets and threads, that uses `timeline` as its clock."""
    cpu = EmulatedDevice(CPU, timeline, profile, spec, plan.ram_budget_bytes, plan.threads)
    if profile.gpu is None or not plan.n_bytes(GPU):
        return Machine(cpu, None, None, CpuCopier())
    gpu = EmulatedDevice(GPU, timeline, profile, spec, plan.vram_budget_bytes)
    link = EmulatedLink(timeline, profile, spec.hidden_size * FLOAT_BYTES, _copied_beside_cpu(plan))
    return Machine(cpu, gpu, link, EmulatedCopier(), MappedBlocks)


def _copied_beside_cpu(plan: Plan) -> frozenset[str]:
    """Return the names of parts that are streamed while the CPU reads weights of other layers.

    For prompts it computes more than it reads, unless these are experts, which few of the tokens choose.
    """
    layers = [part for part in plan.parts if part.layer is not None]
    copied = []
    if any(part.decode_placement not in (Placement.GPU, Placement.STREAM) for part in layers):
        copied += [part.name for part in layers if part.decode_placement == Placement.STREAM]
    if any(part.kind == MoeSpec.name and part.prefill_placement.uses_cpu for part in layers):
        copied += [part.name for part in layers if part.prefill_placement == Placement.VISIT]
    return frozenset(copied)


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
