"""Claims on memory: refused in one sentence, given back once, the same on every device."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.runtime.devices.cpu import CpuDevice
from hetero_ee.runtime.devices.cuda import CudaDevice
from hetero_ee.runtime.devices.device import Device
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.trace import SpanRecorder
from tests.device_support import EmulatedMachine, Fault, FaultyDevice, held_bytes, no_memory, work
from tests.stand_in_cuda import StandInCuda

MIB = 2**20


def devices(budget_bytes: int) -> list[Device]:
    machine = EmulatedMachine(gpu_bytes=budget_bytes)
    return [
        CpuDevice(lambda: 0.0, lambda: budget_bytes),
        CudaDevice(StandInCuda(free_bytes=budget_bytes)),
        CudaDevice(StandInCuda(free_bytes=2 * budget_bytes), budget_bytes=budget_bytes),
        machine.gpu,
    ]


@pytest.mark.parametrize("which", range(4), ids=["cpu", "cuda", "cuda-budget", "emulated"])
def test_claims_and_refusals(which: int) -> None:
    device = devices(100)[which]
    first, second = device.allocate(60, "weights"), device.allocate(30, "keys and values")
    assert device.free_bytes() == 10
    assert held_bytes(device) == {"keys and values": 30, "weights": 60}
    with pytest.raises(DeviceMemoryError):
        device.allocate(11, "logits")
    assert device.free_bytes() == 10
    device.allocate(10, "weights")
    assert held_bytes(device) == {"keys and values": 30, "weights": 70}
    for _ in range(2):  # freeing twice gives the bytes back once
        first.free()
        assert device.free_bytes() == 60
    second.free()
    assert held_bytes(device) == {"weights": 10}
    with pytest.raises(ValueError, match="-1 bytes"):
        device.allocate(-1, "weights")


@pytest.mark.parametrize("which", range(4), ids=["cpu", "cuda", "cuda-budget", "emulated"])
def test_a_refusal_names_bytes_and_the_way_out(which: int) -> None:
    device = devices(8 * MIB)[which]
    device.allocate(5 * MIB, "weights")
    where = device.name.upper()
    told = f"keys and values needs 4.0 MiB on the {where} and 3.0 MiB are free; .*lower .*, or close other programs"
    with pytest.raises(DeviceMemoryError, match=told) as caught:
        device.allocate(4 * MIB, "keys and values")
    assert caught.value.device == device.name


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_nth_allocation_fails(n: int) -> None:
    """Whoever frees what it got before is where it began."""
    machine = EmulatedMachine()
    device = FaultyDevice(machine.gpu, allocation=Fault(n, no_memory))
    held = []
    with pytest.raises(DeviceMemoryError):
        for _ in range(5):
            held.append(device.allocate(10, "weights"))
    assert len(held) == n - 1
    for allocation in held:
        allocation.free()
    assert held_bytes(machine.gpu) == {}


def test_the_cpu_counts_what_other_programs_take() -> None:
    available = [100]
    device = CpuDevice(lambda: 0.0, lambda: available[0])
    allocation = device.allocate(40, "weights")
    assert device.free_bytes() == 60  # not in use yet: the system still shows 100
    available[0] = 60
    assert device.free_bytes() == 60  # now it is
    available[0] = 20
    assert device.free_bytes() == 20  # another program
    available[0] = 70
    allocation.free()
    assert device.free_bytes() == 70


def test_the_gpu_counts_what_torch_keeps_and_other_programs_take() -> None:
    driver = StandInCuda(free_bytes=100)
    device = CudaDevice(driver)
    allocation = device.allocate(40, "weights")
    driver.free, driver.kept, driver.used = 50, 50, 40  # torch took 50 and uses 40
    assert device.free_bytes() == 60
    driver.used = 45  # more than was claimed
    assert device.free_bytes() == 55
    driver.free = 10  # another program took 40
    assert device.free_bytes() == 15
    allocation.free()
    assert device.free_bytes() == 15  # torch still uses it
    driver.used, driver.free = 80, 0
    assert device.free_bytes() == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        np._core._exceptions._ArrayMemoryError((2**40,), np.dtype(np.float32)),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried 8 EiB"),
    ],
)
def test_a_cpu_that_runs_out_while_it_computes(error: Exception) -> None:
    device = CpuDevice(lambda: 0.0, lambda: 3 * MIB)

    def compute() -> None:
        raise error

    with pytest.raises(DeviceMemoryError, match=re.escape("layers.0.ffn needs more on the CPU than the 3.0 MiB that")):
        device.run([work("layers.0.ffn")], compute)


def test_buffers_that_are_too_large_for_the_cpu() -> None:
    device = CpuDevice(lambda: 0.0, lambda: 3 * MIB)
    with pytest.raises(DeviceMemoryError, match=r"needs .* on the CPU"):
        device.empty((2**50,), torch.float32)
    assert device.empty((2, 3), torch.float16).shape == (2, 3)


def test_the_cpu_computes_at_once_by_the_clock() -> None:
    now, recorder = [5.0], SpanRecorder()
    device = CpuDevice(lambda: now[0], lambda: 100, recorder)

    class Later:
        def wait(self) -> None:
            now[0] = 7.0

    def compute() -> str:
        assert now[0] == 7.0  # the event was waited for first
        now[0] = 9.5
        return "done"

    value, event = device.run([work("a"), work("b")], compute, [Later()])
    event.wait()
    assert value == "done"
    assert recorder.spans() == [Span("cpu", "a to b", 7.0, 9.5)]


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    def compute() -> Any:
        raise error

    for device in devices(100):
        with pytest.raises(type(error)) as found:
            device.run([work("a")], compute)
        assert found.value is error


def test_a_lost_device() -> None:
    device = FaultyDevice(EmulatedMachine().gpu, run=Fault(2))
    device.run([work("a")], lambda: None)
    for _ in range(2):
        with pytest.raises(DeviceLostError):
            device.run([work("a")], lambda: None)
