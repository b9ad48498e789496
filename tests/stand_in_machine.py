"""Plans on a computer whose GPU is a stand-in: torch's reference operations on the CPU, behind the real device, link,
copier, streams and executor."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hetero_ee.kv.cache import KvCache
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.gpu_operations import GpuOperations, gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee.planning.plan import Plan
from hetero_ee.runtime.devices.cuda_copier import CudaCopier
from hetero_ee.runtime.devices.cuda_machine import Gpu, cuda_machine, gpu_executor
from hetero_ee.runtime.devices.emulated import EmulatedGpuTensor
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.execution import open_plan
from hetero_ee.runtime.executors.executor import BlockExecutor, HostExecutor
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.model_weights import ModelWeights
from tests.stand_in_cuda import StandInCuda

PLENTY = 2**40
MakeCpu = Callable[[ModelSpec, ModelWeights, KvCache], HostExecutor]
COMPUTED = (
    "linear",
    "normed",
    "mix",
    "forward",
    "forward_with",
    "attend_uploaded",
    "final_norm",
    "lm_head",
    "partial_logits",
    "to_logits",
    "draft_rows",
    "draft_logits",
)


class StandInCopier(CudaCopier):
    """Tensors that count as the GPU's carry another type, as there is one memory only."""

    def is_on_gpu(self, x: Tensor) -> bool:
        return isinstance(x, EmulatedGpuTensor)

    def to_gpu(self, x: Tensor) -> Tensor:
        return x if self.is_on_gpu(x) else super().to_gpu(x).as_subclass(EmulatedGpuTensor)

    def to_cpu(self, x: Tensor) -> Tensor:
        return super().to_cpu(x).as_subclass(Tensor)


class OnStandIn:
    """A GPU's executor: what it is given must be the GPU's, and what it computes is."""

    def __init__(self, inner: BlockExecutor) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name == "embed":
            return lambda batch: found(batch).as_subclass(EmulatedGpuTensor)
        if name not in COMPUTED:
            return found

        def computed(hidden: Tensor, *rest: Any) -> Any:
            assert isinstance(hidden, EmulatedGpuTensor), "hidden states of the CPU on the GPU"
            return found(hidden.as_subclass(Tensor), *rest).as_subclass(EmulatedGpuTensor)

        return computed


def torch_operations() -> GpuOperations:
    return gpu_operations(Registry(lambda package: package == "torch"), "cuda")


def stand_in_gpu(driver: StandInCuda | None = None, operations: GpuOperations | None = None) -> Gpu:
    return Gpu(torch.device("cpu"), driver or StandInCuda(PLENTY), operations or torch_operations())


def marked_layers(*arguments: Any) -> Any:
    """`gpu_executor` on the stand-in."""
    return OnStandIn(gpu_executor(*arguments))


def reference_cpu(spec: ModelSpec, weights: ModelWeights, cache: KvCache) -> HostExecutor:
    """The CPU's part in plain torch, one row at a time: exact, and nothing to compile."""
    return ReferenceExecutor(spec, weights, cache.max_tokens, TorchOps(), cache=cache)


def on_stand_in(
    spec: ModelSpec,
    weights: ModelWeights,
    plan: Plan,
    gpu: Gpu | None = None,
    wrap: Callable[[Machine], Machine] = lambda machine: machine,
    make_cpu: MakeCpu = reference_cpu,
) -> PlannedExecutor:
    gpu = gpu or stand_in_gpu()
    machine = cuda_machine(gpu, spec, plan, time.perf_counter, None, lambda: PLENTY)
    if machine.link is not None:
        copier, open_beside = StandInCopier(gpu.driver, machine.link, 1, 4 * spec.hidden_size), machine.open_beside
        assert open_beside is not None
        marked: Any = lambda *arguments: OnStandIn(open_beside(*arguments))  # noqa: E731
        machine = replace(machine, copier=copier, open_beside=marked)

    return open_plan(
        spec,
        weights,
        plan,
        wrap(machine),
        lambda layers: make_cpu(spec, weights, host_cache(spec, plan.context_tokens, plan.kv_type, layers)),
        lambda layers: marked_layers(gpu, spec, weights, plan, layers),
    )
