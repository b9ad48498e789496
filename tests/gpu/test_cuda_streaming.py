"""Weights streamed through pinned and device buffers by a worker, on a GPU where there is one, else on its stand-in."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hetero_ee.errors import DeviceMemoryError
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.runtime.devices.cpu import CpuDevice
from hetero_ee.runtime.devices.cuda import CudaDevice, CudaLink
from hetero_ee.runtime.devices.cuda_driver import CudaDriver, TorchCuda
from hetero_ee.runtime.devices.cuda_stream import CudaClock
from hetero_ee.runtime.devices.device import CPU, GPU
from hetero_ee.runtime.devices.timeline import TO_GPU
from hetero_ee.runtime.streaming.block_source import PinnedBlocks, block_weights
from hetero_ee.runtime.streaming.streaming import WeightStream
from hetero_ee.runtime.trace import SpanRecorder
from hetero_ee.weights.random_weights import random_weights
from tests.device_support import SPEC, work
from tests.stand_in_cuda import StandInCuda

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BLOCKS = [block for block in decoder_blocks(SPEC) if block.layer is not None]


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=needs_gpu)])
def driver(request: pytest.FixtureRequest) -> CudaDriver:
    return StandInCuda() if request.param == "stand-in" else TorchCuda(torch.device("cuda", 0))


def test_streamed_weights_arrive_whole(driver: CudaDriver) -> None:
    """Twenty passes: a sum over each block's tiles, computed on the device, is that of the block."""
    recorder = SpanRecorder()
    trace = CudaClock(driver, time.perf_counter, recorder)
    gpu, link = CudaDevice(driver, trace=trace), CudaLink(driver, lambda: 2**40, trace)
    weights = random_weights(SPEC)
    stream = WeightStream(PinnedBlocks(BLOCKS, weights, gpu, link), range(len(BLOCKS)), ThreadPoolExecutor(1))

    def total(found: Any) -> torch.Tensor:
        return torch.stack([weight.tiles.long().sum() for weight in found.matrices.values()]).sum()

    sums = []
    for use in range(20 * len(BLOCKS)):
        number = use % len(BLOCKS)
        found, copied = stream.use(number)
        value, computed = gpu.run([work(BLOCKS[number].name)], lambda found=found: total(found), [copied])
        stream.done(number, computed)
        host = link.host_buffer(8).view(torch.int64)
        _, back = link.transfer(
            "sum", 1, 8, CPU, lambda host=host, value=value: host.copy_(value, non_blocking=True), [computed]
        )
        sums.append((number, host, back))
    expected = [int(total(block_weights(block, weights))) for block in BLOCKS]
    cpu = CpuDevice(time.perf_counter, lambda: 2**40)
    for number, host, back in sums:
        assert cpu.run([], lambda host=host: int(host[0]), [back])[0] == expected[number]
    stream.close()
    spans = recorder.spans()
    assert {span.lane for span in spans} >= {GPU, TO_GPU}
    assert all(span.start_s <= span.end_s for span in spans)


@needs_gpu
def test_a_gpu_that_runs_out_of_memory_goes_on() -> None:
    gpu = CudaDevice(TorchCuda(torch.device("cuda", 0)))
    for _ in range(3):
        with pytest.raises(DeviceMemoryError, match=r"MiB on the GPU"):
            gpu.run([work("huge")], lambda: torch.empty(2**45, dtype=torch.uint8, device="cuda:0"))
    value, event = gpu.run([work("small")], lambda: torch.ones(3, device="cuda:0").sum())
    event.wait()
    assert float(value) == 3
