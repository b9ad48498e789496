"""A machine with round numbers, so that time lines can be worked out by hand, and devices that fail when told to.

Seconds by the profile, of a work of `work()`: the CPU takes 4 for one row and 1 more for each other row, the GPU a
quarter of that. To the GPU go 64 bytes a second, 40 beside a busy CPU, to the CPU 32, each
copy 0.5 later; a row crosses in 0.25.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetero_ee.costs.product import Product
from hetero_ee.costs.work import Overhead, Work
from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.devices.device import CPU, GPU, Allocation, Device, Event, Link
from hetero_ee.runtime.devices.emulated import EmulatedDevice, EmulatedLink
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee_profiles.hardware import (
    MEASURED,
    PROFILE_VERSION,
    AttentionTime,
    DeviceTimes,
    HardwareProfile,
    LinkTimes,
    Machine,
    MatmulTime,
    OverheadTime,
)
from hetero_ee_profiles.measurement import Measurement, Origin, derived

ORIGIN = Origin("by hand", "2026-01-01", "none")
SPEC = read_spec(
    {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 48,
        "max_position_embeddings": 64,
    }
)
TINY_S = 2.0**-60  # of a call: everything is in proportion to its size
ROW_BYTES = 4 * 32  # of a hidden state


def figure(value: float, unit: str = "s") -> Measurement:
    return derived(value, unit, ORIGIN)


def device_times(share: float, kv_type: str = "fp32", free_bytes: int = 1000) -> DeviceTimes:
    """share: of the CPU's seconds."""
    return DeviceTimes(
        threads=0 if share < 1 else 2,
        free_bytes=free_bytes,
        read_bytes_per_s=figure(1.0, "B/s"),
        call=figure(TINY_S),
        matmuls=tuple(
            MatmulTime(layout, 16, 32, m, 1, figure((3 + m) * share * factor))
            for layout, factor in (("int4", 1), ("int8", 2))
            for m in (1, 3)
        ),
        attentions=tuple(
            AttentionTime(4, 4, 8, m, n, kv_type, figure((m + n / 8) * share)) for m in (1, 33) for n in (8, 64)
        ),
        overheads=tuple(OverheadTime(32, 64, m, figure(m * share), figure(2 * m * share)) for m in (1, 3)),
    )


def round_profile(kv_type: str = "fp32") -> HardwareProfile:
    rates = dict.fromkeys(("pageable_to_gpu_bytes_per_s", "pageable_to_cpu_bytes_per_s"), figure(16.0, "B/s"))
    link = LinkTimes(
        to_gpu_bytes_per_s=figure(64.0, "B/s"),
        beside_cpu_bytes_per_s=figure(40.0, "B/s"),
        to_cpu_bytes_per_s=figure(32.0, "B/s"),
        both_ways_bytes_per_s=figure(96.0, "B/s"),
        latency=figure(0.5),
        launch=figure(0.125),
        synchronize=figure(0.125),
        transfer=figure(0.25),
        **rates,
    )
    machine = Machine("cpu", 2, "avx2", 2000, "gpu", 1000, None, "none")
    cpu, gpu = device_times(1.0, kv_type, 2000), device_times(0.25, kv_type)
    disk = figure(16.0, "B/s")
    return HardwareProfile(PROFILE_VERSION, "round", MEASURED, machine, (cpu,), gpu, link, disk, ())


def work(name: str, size: int = 1, m: int = 1, disk_bytes: int = 0) -> Work:
    """One product `size` times as large as the one that the profile has times of."""
    return Work(name, m, (Product("int4", 16 * size, 32),), None, Overhead.NONE, disk_bytes)


class EmulatedMachine:
    """cpu, gpu and link over one time line."""

    def __init__(self, profile: HardwareProfile | None = None, spec: ModelSpec = SPEC, gpu_bytes: int = 1000) -> None:
        profile = profile or round_profile()
        self.timeline = Timeline()
        self.cpu = EmulatedDevice(CPU, self.timeline, profile, spec, 2000)
        self.gpu = EmulatedDevice(GPU, self.timeline, profile, spec, gpu_bytes)
        self.link = EmulatedLink(self.timeline, profile, ROW_BYTES)

    def on_cpu(self, name: str, size: int = 1, after: Sequence[Event] = ()) -> Event:
        return self.cpu.run([work(name, size)], lambda: None, after)[1]

    def on_gpu(self, name: str, size: int = 1, after: Sequence[Event] = ()) -> Event:
        return self.gpu.run([work(name, size)], lambda: None, after)[1]

    def copy(self, name: str, n_bytes: int, after: Sequence[Event] = (), to: str = GPU) -> Event:
        return self.link.copy(name, n_bytes, to, lambda: None, after)[1]

    def transfer(self, name: str, to: str, after: Sequence[Event] = (), n_rows: int = 1) -> Event:
        return self.link.transfer(name, n_rows, ROW_BYTES, to, lambda: None, after)[1]

    def rows(self) -> list[tuple[str, str, float, float]]:
        return [(span.lane, span.name, span.start_s, span.end_s) for span in self.timeline.spans]


@dataclass
class Fault:
    """From the n-th call that it is asked about on, counted from 1, it strikes. n = 0: never."""

    n: int = 0
    error: Callable[[], Exception] = field(default=lambda: DeviceLostError("the GPU failed."))
    calls: int = 0
    only_once: bool = False

    def strike(self) -> None:
        self.calls += 1
        if self.n and (self.calls == self.n or (self.calls > self.n and not self.only_once)):
            raise self.error()


class FaultyDevice:
    """A device whose allocations and runs fail when told to; otherwise `inner`."""

    def __init__(self, inner: Device, allocation: Fault | None = None, run: Fault | None = None) -> None:
        self._inner, self._allocation, self._run = inner, allocation or Fault(), run or Fault()

    @property
    def name(self) -> str:
        return self._inner.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allocate(self, n_bytes: int, purpose: str) -> Allocation:
        self._allocation.strike()
        return self._inner.allocate(n_bytes, purpose)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._allocation.strike()
        return self._inner.empty(shape, dtype)

    def run(self, works: Sequence[Work], compute: Callable[[], Any], after: Sequence[Event] = ()) -> tuple[Any, Event]:
        self._run.strike()
        return self._inner.run(works, compute, after)


class FaultyLink:
    """A link whose copies and transfers fail when told to; otherwise `inner`."""

    def __init__(self, inner: Link, copy: Fault | None = None, transfer: Fault | None = None) -> None:
        self._inner, self._copy, self._cross = inner, copy or Fault(), transfer or Fault()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, *arguments: Any, **named: Any) -> Any:
        self._copy.strike()
        return self._inner.copy(*arguments, **named)

    def transfer(self, *arguments: Any, **named: Any) -> Any:
        self._cross.strike()
        return self._inner.transfer(*arguments, **named)


def no_memory() -> Exception:
    return DeviceMemoryError("a test needs more on the GPU than there is.")


def held_bytes(device: Device) -> dict[str, int]:
    """What is claimed on a device, by purpose."""
    found: Counter[str] = Counter()
    for claim in device._claims:
        found[claim.purpose] += claim.n_bytes
    return dict(found)
