"""Opens what runs a model: the CPU alone, a plan on this machine, or a plan on a machine that is emulated."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hetero_ee.config import Progress, cache_folder
from hetero_ee.errors import UsageError
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import check_fits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.prediction import predicted_text_s
from hetero_ee.runtime.devices.device import GPU
from hetero_ee.runtime.devices.timeline import Span
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.growth import Growth
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.hardware import HardwareProfile

if TYPE_CHECKING:
    from hetero_ee.runtime.devices.cuda_machine import Gpu
    from hetero_ee.runtime.executors.planned import PlannedExecutor

FindGpu = Callable[[str | None, Callable[[str], None]], "Gpu | None"]  # see cuda_machine.usable_gpu


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model is to run. plan: None lets the planner decide from the profile; one of the two is there."""

    profile: HardwareProfile | None
    limits: Limits
    plan: Plan | None = None
    statistics: Statistics = field(default_factory=Statistics)
    emulates: bool = False  # the profile's machine, on this CPU; else this machine is used
    traces: bool = False  # records what runs where and when, which an emulated machine does anyway


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that is ready to run."""

    executor: Executor  # to be closed
    clock: Callable[[], float]  # seconds, an emulated machine's own where there is one
    plan: Plan  # as it was opened
    spans: Callable[[], list[Span]] = list  # what ran where and when so far, if that is recorded
    running: "Callable[[], PlannedExecutor] | None" = None  # what runs a plan now, None for the CPU by itself
    is_emulated: bool = False
    placement: Placement | None = None  # what was asked for


class _Again(NamedTuple):
    """How a plan is made again."""

    smaller: Callable[[int, int], Plan] | None  # see ReplanningExecutor's replan
    growth: Growth | None


def open_on_cpu(
    spec: ModelSpec,
    weights: ModelWeights,
    max_tokens: int,
    threads: int,
    progress: Progress | None = None,
    *,
    cache: CpuKvCache | None = None,
) -> HostExecutor:
    """What runs these weights: the CPU kernels where they are quantized, the reference for others. To be closed.

    cache: of some layers alone, see HostExecutor.
    """
    if not _are_quantized(weights):
        return ReferenceExecutor(spec, weights, max_tokens, cache=cache)
    kernels = use_kernel_cache(cache_folder(), progress)
    from hetero_ee.runtime.executors.cpu import (  # the kernels look where to be cached when imported
        COMPILING,
        CpuExecutor,
    )

    executor = CpuExecutor(spec, weights, max_tokens, threads, cache=cache)
    if executor.cache.n_layers == spec.n_layers:
        stage = COMPILING if kernels.keeps else f"{COMPILING} for this run"
        executor.prepare(None if kernels.is_filled() else progress, stage)
        if not kernels.is_filled():
            kernels.set_filled()
    return executor


def open_placed(
    spec: ModelSpec,
    weights: ModelWeights,
    placement: Placement,
    threads: int,
    clock: Callable[[], float],
    warn: Callable[[str], None],
    find_gpu: FindGpu | None = None,
    progress: Progress | None = None,
) -> Opened:
    """What runs the placement's plan, made now where there is none. warn: of what had to be changed, in a sentence.
    find_gpu: cuda_machine.usable_gpu where None.

    Raises UsageError for a request that can't be met, and DeviceMemoryError where not even the CPU has room.
    """
    limits, profile, plan = placement.limits, placement.profile, placement.plan
    if not placement.emulates and not limits.threads:
        limits = replace(limits, threads=threads)
    if plan is None:
        assert profile is not None, "either a plan or a profile"
        if profile.gpu is None and limits.gpu_layers:
            warn("There is no GPU, so all layers run on the CPU")
        plan = make_plan(spec, profile, limits, placement.statistics)
    check_fits(plan, spec)
    again = _plans_again(spec, replace(placement, limits=limits), plan, warn)
    if placement.emulates and profile is not None:
        return _emulated(spec, weights, profile, plan, again, threads, warn)
    if plan.n_bytes(GPU):
        gpu = _found_gpu(plan, weights, placement, warn, find_gpu)
        return _on_gpu(spec, weights, gpu, plan, again, clock, warn, placement.traces)
    if placement.traces:
        return _traced_on_cpu(spec, weights, plan, again, clock, warn, progress)
    executor = _planned_on_cpu(spec, weights, plan, progress)
    executor.plan, executor.growth = plan, again.growth
    return Opened(executor, clock, plan)


def _plans_again(spec: ModelSpec, placement: Placement, plan: Plan, warn: Callable[[str], None]) -> _Again:
    """How this plan is made again. One from a file is none that grows, nor is a context that was asked for."""
    profile, statistics, limits = placement.profile, placement.statistics, placement.limits
    if profile is None:
        return _Again(None, None)
    # In the mode that drafting was opened for, with the exit layers that it has heads of.
    depths = statistics.depths_of(plan)
    statistics = replace(statistics, depths=() if depths is None else (depths,))
    same = replace(limits, kv_type=plan.kv_type, threads=plan.threads, mode=plan.mode, risk=plan.risk)

    def replan(vram_budget_bytes: int, context_tokens: int) -> Plan:
        budget, gpu_layers = (vram_budget_bytes, None) if vram_budget_bytes else (None, 0)
        smaller = replace(same, vram_budget_bytes=budget, gpu_layers=gpu_layers, overrides=())
        return make_plan(spec, profile, replace(smaller, context_tokens=context_tokens), statistics)

    def plan_for(running: Plan, context_tokens: int) -> Plan:
        """Where memory was short without its pins."""
        on_gpu = running.n_bytes(GPU) > 0
        if not on_gpu or running.vram_budget_bytes != plan.vram_budget_bytes:
            return replan(running.vram_budget_bytes if on_gpu else 0, context_tokens)
        return make_plan(spec, profile, replace(same, context_tokens=context_tokens), statistics)

    def token_s(made: Plan, n_depth: int) -> float | None:
        return predicted_text_s(spec, profile, made, statistics, 1, n_depth)

    if placement.plan is not None or limits.context_tokens:
        return _Again(replan, None)
    return _Again(replan, Growth(plan_for, token_s, spec.max_context_tokens, warn))


def _open_layers(
    spec: ModelSpec,
    weights: ModelWeights,
    plan: Plan,
    threads: int,
    layers: tuple[int, ...],
    progress: Progress | None = None,
) -> HostExecutor:
    """The CPU with the plan's keys and values of these layers."""
    from hetero_ee.runtime.execution import planned_cache

    cache = planned_cache(spec, plan, layers)
    return open_on_cpu(spec, weights, plan.context_tokens, threads, progress, cache=cache)


def _planned_on_cpu(spec: ModelSpec, weights: ModelWeights, plan: Plan, progress: Progress | None) -> HostExecutor:
    executor = _open_layers(spec, weights, plan, plan.threads, tuple(range(spec.n_layers)), progress)
    executor.prompt_chunk_tokens = plan.prefill_chunk_tokens
    return executor


def _traced_on_cpu(
    spec: ModelSpec,
    weights: ModelWeights,
    plan: Plan,
    again: _Again,
    clock: Callable[[], float],
    warn: Callable[[str], None],
    progress: Progress | None,
) -> Opened:
    """The plan on this machine's CPU, as a device that records what it does."""
    from hetero_ee.runtime.devices.cpu import host_machine
    from hetero_ee.runtime.execution import open_plan
    from hetero_ee.runtime.executors.planned import PlannedExecutor
    from hetero_ee.runtime.executors.replanning import ReplanningExecutor
    from hetero_ee.runtime.trace import SpanRecorder

    recorder = SpanRecorder()
    machine = host_machine(clock, recorder, weights.held_bytes)

    def opened(made: Plan) -> PlannedExecutor:
        return open_plan(spec, weights, made, machine, lambda layers: _planned_on_cpu(spec, weights, made, progress))

    executor = ReplanningExecutor(plan, None, opened, warn, growth=again.growth)
    return Opened(executor, clock, plan, recorder.spans, lambda: executor.inner)


def _found_gpu(
    plan: Plan,
    weights: ModelWeights,
    placement: Placement,
    warn: Callable[[str], None],
    find_gpu: FindGpu | None,
) -> "Gpu":
    """Raises UsageError where no GPU can run these weights."""
    from hetero_ee.runtime.devices.cuda_machine import usable_gpu

    profile = placement.profile
    gpu = (find_gpu or usable_gpu)(profile.machine.gpu_model if profile is not None else None, warn)
    if gpu is None:
        raise UsageError(
            f"the plan, made for {plan.hardware}, puts parts on a GPU that can't be used here; make one for this "
            "machine, or try it out with hetero-ee simulate."
        )
    if not _are_quantized(weights):
        raise UsageError(
            "the plan puts parts on the GPU, which multiplies int4 and int8 weights only; choose another quantizer "
            "than none, or plan with gpu_layers 0."
        )
    return gpu


def _on_gpu(
    spec: ModelSpec,
    weights: ModelWeights,
    gpu: "Gpu",
    plan: Plan,
    again: _Again,
    clock: Callable[[], float],
    warn: Callable[[str], None],
    traces: bool,
) -> Opened:
    """The plan on this machine's GPU and CPU, after a warm-up pass of its largest size."""
    from hetero_ee.runtime.devices.cuda_machine import cuda_machine, free_ram_bytes, gpu_executor
    from hetero_ee.runtime.execution import open_plan, warmed_up
    from hetero_ee.runtime.executors.planned import PlannedExecutor
    from hetero_ee.runtime.executors.replanning import ReplanningExecutor
    from hetero_ee.runtime.trace import SpanRecorder

    recorder = SpanRecorder() if traces else None

    def opened(made: Plan) -> PlannedExecutor:
        machine = cuda_machine(gpu, spec, made, clock, recorder, lambda: free_ram_bytes() + weights.held_bytes)
        on_cpu = partial(_open_layers, spec, weights, made, made.threads)
        executor = open_plan(spec, weights, made, machine, on_cpu, partial(gpu_executor, gpu, spec, weights, made))
        with recorder.forgetting() if recorder is not None else nullcontext():
            return warmed_up(executor)

    executor = ReplanningExecutor(plan, again.smaller, opened, warn, gpu.reachable_bytes, again.growth)
    return Opened(executor, clock, plan, recorder.spans if recorder is not None else list, lambda: executor.inner)


def _are_quantized(weights: ModelWeights) -> bool:
    """In the layouts that kernels multiply."""
    return all(isinstance(weight, TileWeight | RowWeight) for weight in weights.matrices.values())


def _emulated(
    spec: ModelSpec,
    weights: ModelWeights,
    profile: HardwareProfile,
    plan: Plan,
    again: _Again,
    threads: int,
    warn: Callable[[str], None],
) -> Opened:
    """threads: of this machine, which computes the numbers.

    No warm-up as on a GPU: a pass claims nothing more than opening has, and would move the time line.
    """
    from hetero_ee.runtime.devices.emulated import emulated_machine
    from hetero_ee.runtime.devices.timeline import Timeline
    from hetero_ee.runtime.execution import open_plan
    from hetero_ee.runtime.executors.planned import PlannedExecutor
    from hetero_ee.runtime.executors.replanning import ReplanningExecutor

    timeline = Timeline()

    def opened(made: Plan) -> PlannedExecutor:
        machine = emulated_machine(profile, spec, made, timeline)
        return open_plan(spec, weights, made, machine, partial(_open_layers, spec, weights, made, threads))

    executor = ReplanningExecutor(plan, again.smaller, opened, warn, growth=again.growth)
    return Opened(
        executor, lambda: timeline.now_s, plan, lambda: timeline.spans, lambda: executor.inner, is_emulated=True
    )
