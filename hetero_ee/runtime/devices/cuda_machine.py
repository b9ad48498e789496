"""This computer with its GPU: the devices, the link, and the executor of a plan's parts on the GPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from hetero_ee.costs.product import FLOAT_BYTES
from hetero_ee.device_errors import driver_errors
from hetero_ee.kv.devices import gpu_cache
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.gpu_operations import GpuOperations, gpu_operations
from hetero_ee.ops.registry import Registry, Warn
from hetero_ee.options.engine import MAX_SEQUENCES
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.cpu import CpuDevice
from hetero_ee.runtime.devices.cuda import CudaDevice, CudaLink
from hetero_ee.runtime.devices.cuda_copier import CudaCopier
from hetero_ee.runtime.devices.cuda_driver import CudaDriver, TorchCuda
from hetero_ee.runtime.devices.cuda_stream import CudaClock
from hetero_ee.runtime.devices.device import GPU, Link
from hetero_ee.runtime.devices.machine import BESIDE_KV_TYPE, BESIDE_ROWS, CpuCopier, Machine
from hetero_ee.runtime.executors.gpu import GpuExecutor
from hetero_ee.runtime.streaming.block_source import PinnedBlocks
from hetero_ee.runtime.trace import SpanRecorder
from hetero_ee.runtime.work import n_hot
from hetero_ee.weights.first_units import with_first_units
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee_profiles.gpu.platform import cuda_platform
from hetero_ee_profiles.host.host import this_host
from hetero_ee_profiles.host.memory import memory_info


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use, with its driver and kernels."""

    device: torch.device
    driver: CudaDriver
    operations: GpuOperations

    def reachable_bytes(self) -> int:
        """Return the VRAM that this process has reserved or could still get."""
        with driver_errors("a look at its memory", lambda: 0):
            return self.driver.free_bytes() + self.driver.kept_bytes()


def usable_gpu(model: str | None, warn: Warn) -> Gpu | None:
    """Return the GPU called `model`, or the one with most memory if it is None; None if torch can use no GPU.

    Args:
        warn: see Registry.
    """
    if cuda_platform(None) is None:
        return None
    platform = cuda_platform(model)
    assert platform is not None, "there was one just now"
    operations = gpu_operations(Registry(warn=warn), platform.kind)
    return Gpu(platform.device, TorchCuda(platform.device), operations)


def free_ram_bytes() -> int:
    """Return the memory that the system could still give this process."""
    return memory_info(this_host()).available_bytes


def cuda_machine(
    gpu: Gpu,
    spec: ModelSpec,
    plan: Plan,
    clock: Callable[[], float],
    recorder: SpanRecorder | None = None,
    ram_bytes: Callable[[], int] = free_ram_bytes,
) -> Machine:
    """Return this computer as a machine that runs the plan.

    Args:
        recorder: records what ran where and when, if given.
        ram_bytes: returns the free RAM.

    Raises:
        DeviceMemoryError: if there is no memory for transfer buffers.
        DeviceLostError: if the GPU does not answer.
    """
    cpu = CpuDevice(clock, ram_bytes, recorder)
    if not plan.n_bytes(GPU):
        return Machine(cpu, None, None, CpuCopier())
    trace = CudaClock(gpu.driver, clock, recorder) if recorder is not None else None
    device = CudaDevice(gpu.driver, plan.vram_budget_bytes, trace)
    link = CudaLink(gpu.driver, cpu.free_bytes, trace)
    with driver_errors("buffers of hidden states", gpu.driver.free_bytes):
        copier = CudaCopier(gpu.driver, link, _n_rows(plan), spec.hidden_size * FLOAT_BYTES)

    def make_source(
        blocks: Sequence[Block], weights: ModelWeights, over: Link, _: Callable[[int], int]
    ) -> PinnedBlocks:
        return PinnedBlocks(blocks, weights, device, over)

    def open_beside(other: ModelSpec, weights: ModelWeights, blocks: Sequence[Block], max_tokens: int) -> GpuExecutor:
        with driver_errors("the draft head", gpu.driver.free_bytes):
            cache = gpu_cache(
                other, max_tokens, BESIDE_KV_TYPE, gpu.device, n_slots=MAX_SEQUENCES, n_sequences=plan.n_sequences
            )
            return GpuExecutor(other, weights, blocks, cache, gpu.operations, BESIDE_ROWS)

    workers = partial(ThreadPoolExecutor, 1, "weights")
    return Machine(cpu, device, link, copier, make_source, workers, open_beside)


def gpu_executor(gpu: Gpu, spec: ModelSpec, weights: ModelWeights, plan: Plan, layers: tuple[int, ...]) -> GpuExecutor:
    """Return the executor of the plan's parts on the GPU, with a KV cache of these layers.

    Raises:
        DeviceMemoryError: if they don't fit.
    """
    places = {part.name: part.decode_placement for part in plan.parts}
    blocks = [(block, places.get(block.name)) for block in decoder_blocks(spec)]  # the final norm has none of its own
    hot = [(block, n_hot(block, place)) for block, place in blocks if place is not None and place.is_split]
    weights = with_first_units(weights, hot)
    kept = [block for block, place in blocks if place == Placement.GPU] + [block for block, _ in hot]
    if places["head"] == Placement.GPU and spec.final_norm:
        kept.append(blocks[-2][0])
    visits = any(part.prefill_placement == Placement.VISIT and part.kv_bytes for part in plan.parts)
    with driver_errors("the model", gpu.driver.free_bytes):
        n_rows, sizes = _n_rows(plan), (plan.context_tokens, plan.kv_type)
        cache = gpu_cache(
            spec, *sizes, gpu.device, layers, n_slots=MAX_SEQUENCES, pass_tokens=n_rows, n_sequences=plan.n_sequences
        )
        return GpuExecutor(spec, weights, kept, cache, gpu.operations, n_rows, plan.kv_type if visits else None)


def _n_rows(plan: Plan) -> int:
    return max(plan.prefill_chunk_tokens, MAX_DECODE_TOKENS)
