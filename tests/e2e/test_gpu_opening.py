"""A model opened on this computer's GPU, here its stand-in: what is refused, what is told, and what goes on after
memory ran out."""

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.errors import DeviceMemoryError, UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.devices import cuda_machine
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.replanning import ReplanningExecutor
from hetero_ee.runtime.gpu.segment import GpuSegment
from hetero_ee.runtime.opening import Opened, open_on_cpu, open_planned
from hetero_ee_profiles.reference import reference_profile
from hetero_ee_profiles.units import GIB
from tests.device_support import Fault, FaultyDevice, held_bytes, no_memory
from tests.emulation import LAPTOP, planned, prompt_of
from tests.executor_support import Model, model_of
from tests.stand_in_cuda import StandInCuda
from tests.stand_in_machine import PLENTY, StandInCopier, marked_layers, on_stand_in, stand_in_gpu, torch_operations

PROMPT, N_TOKENS, CONTEXT_TOKENS = [1, 17, 30, 3, 99, 42, 7], 4, 64
HALF = ((r"layers\.0\..*", "gpu"), ("layers.*", "cpu"))
STREAMED = (("layers.*", "stream"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of("llama-tied", "int4", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    """What the CPU alone says."""
    executor = open_on_cpu(*model, CONTEXT_TOKENS, 1)
    said = generated(executor)
    executor.close()
    return said


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    """A GPU in this computer."""
    monkeypatch.setattr(cuda_machine, "CudaCopier", StandInCopier)
    monkeypatch.setattr(cuda_machine, "gpu_executor", marked_layers)
    monkeypatch.setattr(cuda_machine, "free_ram_bytes", lambda: PLENTY)
    return StandInCuda(PLENTY)


def plan_of(model: Model, overrides: Any = HALF) -> Plan:
    return planned(model[0], overrides=overrides, context_tokens=CONTEXT_TOKENS)


def generated(executor: Executor) -> list[int]:
    """Greedy tokens behind the prompt, in a sequence that is closed again."""
    sequence = executor.cache.open_new()
    tokens = [int(executor.prompt(prompt_of(executor, sequence, PROMPT)).argmax())]
    while len(tokens) < N_TOKENS:
        batch = Batch.of_sequence(sequence, executor.cache.length(sequence), tokens[-1:])
        tokens.append(int(executor.logits(batch, [0])[0].argmax()))
    executor.cache.check()
    executor.cache.close(sequence)
    return tokens


def opened(model: Model, driver: StandInCuda | None, told: list[str], **placement: Any) -> Opened:
    asked = PlanRequest(
        placement.pop("profile", reference_profile(LAPTOP)),
        placement.pop("limits", Limits(overrides=HALF, context_tokens=CONTEXT_TOKENS)),
        **placement,
    )
    gpu = None if driver is None else stand_in_gpu(driver)
    return open_planned(*model, asked, 1, time.perf_counter, told.append, lambda name, warn: gpu)


@pytest.mark.parametrize("overrides", [HALF, STREAMED])
def test_a_plan_is_run_on_the_gpu(model: Model, driver: StandInCuda, text: list[int], overrides: Any) -> None:
    told: list[str] = []
    found = opened(model, driver, told, limits=Limits(overrides=overrides, context_tokens=CONTEXT_TOKENS))
    assert generated(found.executor) == text
    found.executor.close()
    assert told == [] and found.spans() == []
    assert found.plan.n_bytes("gpu") > 0 and found.clock is time.perf_counter


@pytest.mark.parametrize("family", ["nemotron-h", "granite-hybrid"])
def test_mamba_layers_run_on_the_gpu(family: str, driver: StandInCuda, tmp_path: Path) -> None:
    hybrid, told = model_of(family, "int4", tmp_path), list[str]()
    alone = open_on_cpu(*hybrid, CONTEXT_TOKENS, 1)
    found = opened(hybrid, driver, told, limits=Limits(gpu_layers=3, context_tokens=CONTEXT_TOKENS))
    assert told == [] and "gpu" in {p.decode_placement for p in found.plan.parts if p.name.endswith("mamba")}
    assert generated(found.executor) == generated(alone)
    found.executor.close()
    alone.close()


def test_weights_that_were_copied_are_claimed_once(
    model: Model, driver: StandInCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec, weights), plan = model, plan_of(model)
    monkeypatch.setattr(cuda_machine, "free_ram_bytes", lambda: plan.n_bytes("cpu") - 1000)
    with pytest.raises(DeviceMemoryError):
        opened(model, driver, [], plan=plan)
    opened((spec, replace(weights, held_bytes=1000)), driver, [], plan=plan).executor.close()


def test_where_time_goes_is_recorded_when_asked_for(model: Model, driver: StandInCuda) -> None:
    pins = (("embedding", "cpu"), *STREAMED)
    found = opened(model, driver, [], traces=True, limits=Limits(overrides=pins, context_tokens=CONTEXT_TOKENS))
    generated(found.executor)
    found.executor.close()
    spans = found.spans()
    assert {span.lane for span in spans} == {"cpu", "gpu", "to_gpu", "rows_to_gpu", "rows_to_cpu"}
    assert any("layers.0.attention" in span.name for span in spans if span.lane == "to_gpu")


def test_sequences_that_the_gpus_cache_is_too_small_for(
    model: Model, driver: StandInCuda, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context that nobody asked for grows for all of them together."""
    monkeypatch.setattr("hetero_ee.planning.context.USUAL_TOKENS", 64)
    monkeypatch.setattr("hetero_ee.planning.context.FREE", 2.0)
    told: list[str] = []
    executor = opened(model, driver, told, limits=Limits(overrides=HALF)).executor
    assert executor.cache.max_tokens == 64 < executor.most_tokens
    others = [executor.cache.open_new() for _ in range(2)]
    for other in others:
        executor.make_room({other: len(PROMPT)})
        executor.prompt(prompt_of(executor, other, PROMPT))
    assert len(told) == 1 and told[0].startswith("The context grew from 64 to 160 tokens: ")
    executor.cache.close(others[0])
    assert generated(executor) == text
    executor.close()


def test_what_no_gpu_can_run_is_refused(model: Model, driver: StandInCuda, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="puts parts on a GPU that can't be used here; make one for this machine"):
        opened(model, None, [])
    with pytest.raises(UsageError, match="multiplies int4 and int8 weights only; choose another quantizer"):
        opened(model_of("llama-tied", "fp32", tmp_path), driver, [])


def test_a_plan_without_gpu_needs_none(model: Model, text: list[int]) -> None:
    everything = Limits(overrides=(("layers.*|head", "cpu"),), context_tokens=CONTEXT_TOKENS)
    found = opened(model, None, [], limits=everything)
    assert generated(found.executor) == text
    found.executor.close()


def test_another_programs_memory_is_told_of_once(model: Model, driver: StandInCuda, text: list[int]) -> None:
    told: list[str] = []
    executor = opened(model, driver, told).executor
    driver.free -= GIB // 4  # kernels, graphs
    generated(executor)
    assert told == []
    driver.free -= 2 * GIB
    for _ in range(2):
        assert generated(executor) == text
    assert len(told) == 1 and "taken 2.2 GiB of VRAM since this model was opened" in told[0]
    driver.free, driver.kept = PLENTY - GIB, GIB  # torch's own is nobody else's
    executor = opened(model, driver, told).executor
    driver.free, driver.kept = driver.free - 2 * GIB, driver.kept + 2 * GIB
    generated(executor)
    assert len(told) == 1


class Faulty:
    """A computer that can be opened again and again, whose GPU fails as told."""

    def __init__(
        self,
        model: Model,
        allocation: Fault | None = None,
        run: Fault | None = None,
        operations: GpuOperations | None = None,
    ) -> None:
        self.gpu = stand_in_gpu(operations=operations)
        self.model, self.allocation, self.run = model, allocation or Fault(), run or Fault()
        self.machines: list[Machine] = []

    def open(self, plan: Plan) -> PlannedExecutor:
        def wrap(machine: Machine) -> Machine:
            self.machines.append(machine)
            return machine if machine.gpu is None else replace(machine, gpu=faulty(machine.gpu))

        def faulty(gpu: Any) -> Any:
            return FaultyDevice(gpu, self.allocation, self.run)

        def on_cpu(spec: Any, weights: Any, cache: Any) -> HostExecutor:
            return open_on_cpu(spec, weights, CONTEXT_TOKENS, 1, cache=cache)

        return on_stand_in(*self.model, plan, self.gpu, wrap, on_cpu)

    def replan(self, budget_bytes: int, context_tokens: int) -> Plan:
        return plan_of(self.model, HALF if budget_bytes else (("layers.*|head", "cpu"),))

    def held_bytes(self) -> list[dict[str, int]]:
        return [held_bytes(device) for m in self.machines for device in (m.cpu, m.gpu) if device is not None]


@pytest.mark.parametrize("overrides", [HALF, STREAMED, (("layers.*|head", "gpu"),)])
@pytest.mark.sample(1)
def test_memory_that_runs_out_at_any_allocation(model: Model, text: list[int], overrides: Any) -> None:
    assert_survives(model, text, overrides, lambda fault: {"allocation": fault}, at_least=5)


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow, id="every"), pytest.param(9, id="some")])
@pytest.mark.parametrize("overrides", [HALF, STREAMED])
@pytest.mark.sample(1)
def test_memory_that_runs_out_in_any_step(model: Model, text: list[int], overrides: Any, stride: int) -> None:
    assert_survives(model, text, overrides, lambda fault: {"run": fault}, 20, stride)


def assert_survives(
    model: Model,
    text: list[int],
    overrides: Any,
    place: Callable[[Fault], dict[str, Fault]],
    at_least: int,
    stride: int = 1,
) -> None:
    """For every n: the n-th fails; the text is the same, something was told, and closing gives all memory back."""
    for n in itertools.count(1, stride):
        fault, told = Fault(n, no_memory, only_once=True), []
        computer = Faulty(model, **place(fault))
        executor = ReplanningExecutor(plan_of(model, overrides), computer.replan, computer.open, told.append)
        assert generated(executor) == text
        assert generated(executor) == text
        executor.close()
        assert all(held == {} for held in computer.held_bytes())
        if fault.calls < n:
            break
        assert len(told) == 1 and "continuing" in told[0].lower()
    assert n > at_least


@pytest.mark.sample(0)
def test_what_ran_out_is_let_go_before_the_next_plan_is_opened(model: Model) -> None:
    """By the error too, whose frames had it: else there would be no room for the next one."""
    alive: list[int] = []
    operations, fault = torch_operations(), Fault(8, lambda: torch.OutOfMemoryError("CUDA out of memory."))
    fault.only_once = True

    class Watched(Faulty):
        def open(self, plan: Plan) -> PlannedExecutor:
            alive.append(sum(type(each) is GpuSegment for each in gc.get_objects()))
            return super().open(plan)

    def activate(*arguments: Any, **options: Any) -> Any:
        fault.strike()
        return operations.activate(*arguments, **options)

    gc.collect()
    computer = Watched(model, operations=replace(operations, activate=activate, is_capturable=True))
    executor = ReplanningExecutor(plan_of(model, STREAMED), computer.replan, computer.open, lambda told: None)
    generated(executor)
    assert len(alive) == 2 and alive[1] == alive[0]


def test_memory_of_the_cpu_is_not_the_gpus_to_make_up_for(model: Model, text: list[int]) -> None:
    def error() -> Exception:
        return DeviceMemoryError("weights need more on the CPU than there is.", "cpu")

    told: list[str] = []
    computer = Faulty(model, run=Fault(4, error, only_once=True))
    executor = ReplanningExecutor(plan_of(model), computer.replan, computer.open, told.append)
    with pytest.raises(DeviceMemoryError, match="on the CPU"):
        generated(executor)
    executor.cache.close(0)
    assert told == [] and len(computer.machines) == 1
    assert generated(executor) == text
    with pytest.raises(DeviceMemoryError, match="on the CPU"):
        ReplanningExecutor(plan_of(model), computer.replan, Faulty(model, Fault(1, error)).open, told.append)


def test_without_a_profile_there_is_no_other_plan(model: Model) -> None:
    computer = Faulty(model, run=Fault(4, no_memory, only_once=True))
    executor = ReplanningExecutor(plan_of(model), None, computer.open, lambda told: None)
    with pytest.raises(DeviceMemoryError):
        generated(executor)
