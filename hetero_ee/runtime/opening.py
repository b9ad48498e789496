"""Opens executors: for the CPU without a plan, for a plan on this machine, or for one on an emulated machine."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hetero_ee.config import COMPILING, Progress, cache_folder
from hetero_ee.errors import UsageError
from hetero_ee.kv.cache import KvCache
from hetero_ee.kv.devices import host_cache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import MODEL_OPTIONS, PLAN_OPTIONS
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import check_fits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.runtime.replans import Growth, Replans
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.units import GIB

if TYPE_CHECKING:
    from hetero_ee.runtime.devices.cuda_machine import Gpu
    from hetero_ee.runtime.devices.machine import Machine
    from hetero_ee.runtime.executors.executor import BlockExecutor
    from hetero_ee.runtime.executors.planned import PlannedExecutor
    from hetero_ee.runtime.executors.replanning import Replan

FindGpu = Callable[[str | None, Callable[[str], None]], "Gpu | None"]  # see cuda_machine.usable_gpu


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that is ready to run."""

    executor: Executor  # to be closed
    clock: Callable[[], float]  # seconds; virtual ones for an emulated machine
    plan: Plan  # as it was opened
    spans: Callable[[], list[Span]] = list  # what ran where and when so far, if that is recorded
    running: "Callable[[], PlannedExecutor] | None" = None  # what runs a plan now, None for the CPU by itself
    is_emulated: bool = False
    request: PlanRequest | None = None  # the request it was opened for


def open_on_cpu(
    spec: ModelSpec,
    weights: ModelWeights,
    max_tokens: int,
    threads: int,
    progress: Progress | None = None,
    *,
    cache: KvCache | None = None,
    draft_length: int = 1,
    reads_ahead: bool = False,
) -> HostExecutor:
    """Open an executor on the CPU: the CPU kernels if the weights are quantized, else the reference.

    The first start compiles the kernels for passes of up to draft_length tokens.

    Args:
        reads_ahead: see CpuOps.
    """
    if not _are_quantized(weights):
        return ReferenceExecutor(spec, weights, max_tokens, cache=cache)
    kernels = use_kernel_cache(cache_folder())
    from hetero_ee.runtime.executors.cpu import CpuExecutor  # kernels read the cache folder at import

    executor = CpuExecutor(spec, weights, max_tokens, threads, cache=cache, reads_ahead=reads_ahead)
    if len(executor.cache.held_layers) == spec.n_layers:
        if kernels.is_filled():
            executor.prepare()
        else:
            stage = COMPILING if kernels.keeps else f"{COMPILING} for this run"
            executor.prepare(progress, stage, range(1, min(draft_length, executor.cache.max_tokens) + 1))
            kernels.set_filled()
    return executor


def open_planned(
    spec: ModelSpec,
    weights: ModelWeights,
    request: PlanRequest,
    threads: int,
    clock: Callable[[], float],
    warn: Callable[[str], None],
    find_gpu: FindGpu | None = None,
    progress: Progress | None = None,
) -> Opened:
    """Open the requested plan, or make one first if none was given.

    Args:
        warn: called with a sentence about each change of the request.
        find_gpu: finds the GPU; None for cuda_machine.usable_gpu.

    Raises:
        UsageError: if the request can't be met.
        DeviceMemoryError: if not even the CPU has enough memory.
    """
    limits, profile, plan = request.limits, request.profile, request.plan
    if not request.emulates and not limits.threads:
        limits = replace(limits, threads=threads)
    if plan is None:
        assert profile is not None, "either a plan or a profile"
        if profile.gpu is None and limits.gpu_layers:
            warn("There is no GPU, so all layers run on the CPU")
        plan = make_plan(spec, profile, limits, request.statistics)
    check_fits(plan, spec)
    if on_disk_bytes := plan.disk_weight_bytes:
        warn(
            f"{on_disk_bytes / GIB:.2f} GiB of weights don't fit in RAM and are read from the disk: "
            f"{plan.prediction.generated_tokens_per_s:.3g} tokens/s are expected"
        )
    opening = _Opening(spec, weights, plan, Replans.of(spec, request, limits, plan), clock, warn)
    if request.emulates and profile is not None:
        return opening.emulated(profile, threads)
    if plan.n_bytes(GPU):
        return opening.on_gpu(_found_gpu(plan, weights, profile, warn, find_gpu), traces=request.traces)
    return opening.traced_on_cpu(progress) if request.traces else opening.on_cpu(progress)


@dataclass(frozen=True, slots=True)
class _Opening:
    """Opens a plan of a model, and later the plans that replace it."""

    spec: ModelSpec
    weights: ModelWeights
    plan: Plan
    replans: Replans | None
    clock: Callable[[], float]
    warn: Callable[[str], None]

    def on_cpu(self, progress: Progress | None) -> Opened:
        """Open a plan that uses no GPU, without recording traces."""
        executor = self._host(self.plan, self.plan.threads, progress, tuple(range(self.spec.n_layers)))
        executor.prompt_chunk_tokens = self.plan.prefill_chunk_tokens
        executor.plan, executor.growth = self.plan, self._growth
        return Opened(executor, self.clock, self.plan)

    def traced_on_cpu(self, progress: Progress | None) -> Opened:
        """Open a plan that uses no GPU on a machine that records what the CPU does."""
        from hetero_ee.runtime.devices.cpu import host_machine
        from hetero_ee.runtime.trace import SpanRecorder

        recorder = SpanRecorder()
        machine = host_machine(self.clock, recorder, self.weights.held_bytes)

        def opened(made: Plan) -> "PlannedExecutor":
            return self._opened(made, machine, made.threads, progress)

        return self._replanning(opened, self.clock, recorder.spans)

    def on_gpu(self, gpu: "Gpu", *, traces: bool) -> Opened:
        """Open a plan on this machine's GPU and CPU, and warm it up with the largest passes."""
        from hetero_ee.runtime.devices.cuda_machine import cuda_machine, free_ram_bytes, gpu_executor
        from hetero_ee.runtime.execution import warmed_up
        from hetero_ee.runtime.trace import SpanRecorder

        spec, weights = self.spec, self.weights
        recorder = SpanRecorder() if traces else None

        def opened(made: Plan) -> "PlannedExecutor":
            machine = cuda_machine(gpu, spec, made, self.clock, recorder, lambda: free_ram_bytes() + weights.held_bytes)
            make_gpu = partial(gpu_executor, gpu, spec, weights, made)
            executor = self._opened(made, machine, made.threads, None, make_gpu)
            with recorder.forgetting() if recorder is not None else nullcontext():
                return warmed_up(executor)

        spans = list if recorder is None else recorder.spans
        return self._replanning(opened, self.clock, spans, self._smaller, gpu.reachable_bytes)

    def emulated(self, profile: HardwareProfile, threads: int) -> Opened:
        """Open a plan on the emulated machine of a profile. This machine computes its numbers with `threads` threads.

        There is no warm-up: it would need no more memory than opening does, and would advance the virtual clock.
        """
        from hetero_ee.runtime.devices.emulated import emulated_machine
        from hetero_ee.runtime.devices.timeline import Timeline

        timeline = Timeline()

        def opened(made: Plan) -> "PlannedExecutor":
            return self._opened(made, emulated_machine(profile, self.spec, made, timeline), threads)

        found = self._replanning(opened, lambda: timeline.now_s, lambda: timeline.spans, self._smaller)
        return replace(found, is_emulated=True)

    @property
    def _smaller(self) -> "Replan | None":
        return None if self.replans is None else self.replans.smaller

    @property
    def _growth(self) -> Growth | None:
        return Growth(self.replans, self.warn) if self.replans is not None and self.replans.grows else None

    def _host(self, made: Plan, threads: int, progress: Progress | None, layers: tuple[int, ...]) -> HostExecutor:
        """Open the CPU's executor with a KV cache of these layers."""
        cache = host_cache(self.spec, made.context_tokens, made.kv_type, layers, made.snapshot_bytes)
        return open_on_cpu(
            self.spec,
            self.weights,
            made.context_tokens,
            threads,
            progress,
            cache=cache,
            draft_length=made.draft_length,
            reads_ahead=made.disk_weight_bytes > 0,
        )

    def _opened(
        self,
        made: Plan,
        machine: "Machine",
        threads: int,
        progress: Progress | None = None,
        make_gpu: "Callable[[tuple[int, ...]], BlockExecutor] | None" = None,
    ) -> "PlannedExecutor":
        from hetero_ee.runtime.execution import open_plan

        make_cpu = partial(self._host, made, threads, progress)
        return open_plan(self.spec, self.weights, made, machine, make_cpu, make_gpu)

    def _replanning(
        self,
        open_plan: "Callable[[Plan], PlannedExecutor]",
        clock: Callable[[], float],
        spans: Callable[[], list[Span]],
        replan: "Replan | None" = None,
        reachable_bytes: Callable[[], int] | None = None,
    ) -> Opened:
        from hetero_ee.runtime.executors.replanning import ReplanningExecutor

        executor = ReplanningExecutor(self.plan, replan, open_plan, self.warn, reachable_bytes, self._growth)
        return Opened(executor, clock, self.plan, spans, lambda: executor.inner)


def _found_gpu(
    plan: Plan,
    weights: ModelWeights,
    profile: HardwareProfile | None,
    warn: Callable[[str], None],
    find_gpu: FindGpu | None,
) -> "Gpu":
    """Find the GPU that the plan uses.

    Raises:
        UsageError: if no GPU can run these weights.
    """
    from hetero_ee.runtime.devices.cuda_machine import usable_gpu

    gpu = (find_gpu or usable_gpu)(profile.machine.gpu_model if profile is not None else None, warn)
    if gpu is None:
        raise UsageError(
            f"the plan, made for {plan.hardware}, puts parts on a GPU that can't be used here; make one for this "
            "machine, or try it out with hetero-ee simulate."
        )
    if not _are_quantized(weights):
        raise UsageError(
            "the plan puts parts on the GPU, which multiplies int4 and int8 weights only; choose another ",
            MODEL_OPTIONS["quantizer"],
            " than none, or plan with ",
            PLAN_OPTIONS["gpu_layers"],
            " 0.",
        )
    return gpu


def _are_quantized(weights: ModelWeights) -> bool:
    """Return whether all matrices are in formats that the kernels multiply."""
    return all(isinstance(weight, TileWeight | RowWeight) for weight in weights.matrices.values())
