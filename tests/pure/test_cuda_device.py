"""A GPU's device and link on a stand-in for torch.cuda: who waits for whom, what is recorded, which error is what."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hetero_ee.errors import DeviceLostError, DeviceMemoryError
from hetero_ee.runtime.devices.cpu import CpuDevice
from hetero_ee.runtime.devices.cuda import CudaDevice, CudaLink
from hetero_ee.runtime.devices.cuda_stream import CudaClock
from hetero_ee.runtime.devices.device import CPU, GPU
from hetero_ee.runtime.devices.timeline import ROWS_TO_CPU, TO_GPU, Span
from hetero_ee.runtime.trace import SpanRecorder
from tests.device_support import work
from tests.stand_in_cuda import ILLEGAL, StandInCuda

MIB = 2**20


class Gpu:
    """device and link on one driver; launches are named."""

    def __init__(self, driver: StandInCuda | None = None, trace: CudaClock | None = None) -> None:
        self.driver = driver or StandInCuda(free_bytes=3 * MIB)
        self.device = CudaDevice(self.driver, trace=trace)
        self.link = CudaLink(self.driver, lambda: 2 * MIB, trace)

    def launches(self, name: str, milliseconds: float = 0.0) -> Callable[[], None]:
        return lambda: self.driver.launch(name, milliseconds)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def test_computing_goes_to_torchs_own_stream_without_waiting(gpu: Gpu) -> None:
    value, _ = gpu.device.run([work("a")], lambda: (gpu.driver.launch("kernel"), 7)[1])
    assert value == 7
    assert gpu.driver.log == [("compute", "runs", "kernel"), ("compute", "records", "event 1")]


def test_streams_wait_for_events_of_the_gpu(gpu: Gpu) -> None:
    """Copy, compute, copy back: the host waits at the end alone."""
    _, copied = gpu.link.copy("weights", 10, GPU, gpu.launches("copy"))
    _, computed = gpu.device.run([work("a")], gpu.launches("kernel"), [copied])
    _, back = gpu.link.transfer("rows", 1, 10, CPU, gpu.launches("transfer"), [computed])
    assert [entry[1:] for entry in gpu.driver.log] == [
        ("runs", "copy"),
        ("records", "event 1"),
        ("waits for", "event 1"),
        ("runs", "kernel"),
        ("records", "event 2"),
        ("waits for", "event 2"),
        ("runs", "transfer"),
        ("records", "event 3"),
    ]
    streams = [entry[0] for entry in gpu.driver.log]
    assert streams[2] == streams[3] == streams[4] == "compute"
    assert "host" not in streams
    back.wait()
    assert gpu.driver.log[-1] == ("host", "waits for", "event 3")


def test_the_cpu_waits_for_the_gpu_before_it_computes(gpu: Gpu) -> None:
    cpu = CpuDevice(lambda: 0.0, lambda: 100)
    _, done = gpu.device.run([work("a")], gpu.launches("kernel"))
    cpu.run([work("b")], gpu.launches("on the CPU"), [done])
    assert gpu.driver.log[-2:] == [("host", "waits for", "event 1"), ("compute", "runs", "on the CPU")]


def test_the_gpu_begins_after_work_of_the_cpu(gpu: Gpu) -> None:
    """Whatever an event is, it is reached before the launch."""

    class Other:
        def wait(self) -> None:
            gpu.driver.log.append(("host", "waits for", "another device"))

    gpu.device.run([work("a")], gpu.launches("kernel"), [Other()])
    assert [entry[2] for entry in gpu.driver.log] == ["another device", "kernel", "event 1"]


def test_each_direction_and_kind_of_copy_has_a_stream(gpu: Gpu) -> None:
    """A row never waits behind weights in line."""
    for to in (GPU, CPU):
        gpu.link.copy("weights", 10, to, gpu.launches("copy"))
        gpu.link.transfer("rows", 1, 10, to, gpu.launches("transfer"))
    streams = [entry[0] for entry in gpu.driver.log if entry[1] == "runs"]
    assert len(set(streams)) == 4 and "compute" not in streams


def test_what_a_copy_reads_is_kept_until_it_is_through(gpu: Gpu) -> None:
    hidden = torch.zeros(3)
    there = weakref.ref(hidden)
    _, event = gpu.link.transfer("rows", 1, 12, CPU, partial(hidden.clone))
    del hidden
    gpu.link.transfer("rows", 1, 12, CPU, lambda: None)
    gc.collect()
    assert there() is not None
    event.wait()
    gpu.link.transfer("rows", 1, 12, CPU, lambda: None)
    gc.collect()
    assert there() is None


def test_after_work_that_fails_launches_go_to_the_stream_of_before(gpu: Gpu) -> None:
    with pytest.raises(ZeroDivisionError):
        gpu.link.copy("weights", 10, GPU, lambda: 1 // 0)
    gpu.driver.launch("kernel")
    assert gpu.driver.log == [("compute", "runs", "kernel")]


def test_spans_are_on_the_hosts_clock() -> None:
    driver, recorder = StandInCuda(), SpanRecorder()
    driver.gpu_ms = 1000.0
    gpu = Gpu(driver, CudaClock(driver, lambda: 50.0, recorder))
    driver.gpu_ms += 250
    gpu.device.run([work("a"), work("b")], gpu.launches("kernel", 500))
    gpu.link.copy("weights", 10, GPU, gpu.launches("copy", 250))
    gpu.link.transfer("rows", 1, 10, CPU, gpu.launches("transfer", 125))
    assert recorder.spans() == [
        Span(GPU, "a to b", 50.25, 50.75),
        Span(TO_GPU, "weights", 50.75, 51.0),
        Span(ROWS_TO_CPU, "rows", 51.0, 51.125),
    ]


def raising(error: Exception) -> Callable[[], Any]:
    def compute() -> Any:
        raise error

    return compute


NO_MEMORY = [
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
        "needs 20.0 MiB on the GPU and 3.0 MiB are free",
    ),
    (
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB. GPU 0"),
        "needs 2048.0 MiB on the GPU and 3.0 MiB are free",
    ),
    (
        torch.AcceleratorError("CUDA error: out of memory\nSearch for"),
        "needs more on the GPU than the 3.0 MiB that are free",
    ),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "needs more on the GPU than the 3.0 MiB that are free"),
]
LOST = [
    torch.AcceleratorError(ILLEGAL),
    RuntimeError(ILLEGAL),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("HIP error: the operation cannot be performed in the present state"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
]


@pytest.mark.parametrize(("error", "told"), NO_MEMORY)
def test_no_memory_while_computing_or_copying(gpu: Gpu, error: Exception, told: str) -> None:
    for fail in (
        lambda: gpu.device.run([work("layers.3.ffn")], raising(error)),
        lambda: gpu.link.copy("layers.3.ffn", 10, GPU, raising(error)),
        lambda: gpu.link.transfer("layers.3.ffn", 1, 10, CPU, raising(error)),
    ):
        with pytest.raises(DeviceMemoryError, match=f"layers.3.ffn {told}; lower the VRAM budget"):
            fail()


@pytest.mark.parametrize("error", LOST)
def test_a_lost_gpu(gpu: Gpu, error: Exception) -> None:
    with pytest.raises(DeviceLostError) as found:
        gpu.device.run([work("layers.3.ffn")], raising(error))
    told = str(found.value)
    assert told.startswith("the GPU failed during layers.3.ffn (") and "VRAM budget of 0" in told and "\n" not in told


@pytest.mark.parametrize(
    ("fail", "use"),
    [
        ("record", lambda gpu, event: gpu.device.run([work("a")], lambda: None)),
        ("record", lambda gpu, event: gpu.link.copy("a", 10, GPU, lambda: None, [event])),
        ("synchronize", lambda gpu, event: event.wait()),
        ("synchronize", lambda gpu, event: CpuDevice(lambda: 0.0, lambda: 0).run([], lambda: None, [event])),
        ("free_bytes", lambda gpu, event: gpu.device.allocate(1, "weights")),
        ("empty", lambda gpu, event: gpu.device.empty((3,), torch.uint8)),
        ("pinned", lambda gpu, event: gpu.link.host_buffer(3)),
        ("new_stream", lambda gpu, event: CudaLink(gpu.driver, lambda: 0)),
    ],
)
def test_a_gpu_lost_at_any_call(gpu: Gpu, fail: str, use: Callable[[Gpu, Any], Any]) -> None:
    _, event = gpu.device.run([work("a")], lambda: None)
    gpu.driver.fail = fail
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        use(gpu, event)


def test_a_gpu_lost_while_it_has_no_memory(gpu: Gpu) -> None:
    gpu.driver.fail = "free_bytes"
    with pytest.raises(DeviceLostError):
        gpu.device.run([work("a")], raising(NO_MEMORY[0][0]))


def test_no_memory_for_a_buffer(gpu: Gpu) -> None:
    gpu.driver.fail, gpu.driver.error = "empty", NO_MEMORY[0][0]
    with pytest.raises(DeviceMemoryError, match=r"a buffer needs 20.0 MiB on the GPU and 3.0 MiB are free"):
        gpu.device.empty((5 * MIB,), torch.float32)


def test_no_memory_that_can_be_pinned(gpu: Gpu) -> None:
    """It is the CPU's that is missing, whatever CUDA calls it."""
    assert gpu.link.host_buffer(10).shape == (10,)
    gpu.driver.fail, gpu.driver.error = "pinned", NO_MEMORY[2][0]
    with pytest.raises(DeviceMemoryError, match=r"needs 5.0 MiB on the CPU and 2.0 MiB are free; lower the context"):
        gpu.link.host_buffer(5 * MIB)
