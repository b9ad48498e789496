"""The pass after loading: it finds what the first long prompt would have no memory for, and leaves nothing behind."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_ee.ops.gpu_operations import GpuOperations
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.devices import cuda_machine
from hetero_ee.runtime.execution import warmed_up
from hetero_ee.runtime.executors.planned import PlannedExecutor
from hetero_ee.runtime.executors.replanning import N_SMALLER, ReplanningExecutor
from hetero_ee.runtime.opening import Opened, open_planned
from hetero_ee_profiles.reference import reference_profile
from tests.device_support import Fault, no_memory
from tests.e2e.test_gpu_opening import CONTEXT_TOKENS, HALF, STREAMED, Faulty, generated, model, plan_of, text
from tests.emulation import LAPTOP
from tests.executor_support import Model
from tests.stand_in_cuda import StandInCuda
from tests.stand_in_machine import PLENTY, StandInCopier, marked_layers, stand_in_gpu, torch_operations

__all__ = ["model", "text"]  # the fixtures
CHUNK_TOKENS = 40


def chunked(model: Model, overrides: Any = HALF) -> Plan:
    return replace(plan_of(model, overrides), prefill_chunk_tokens=CHUNK_TOKENS)


class Proving(Faulty):
    """A computer whose plans are proven as they are opened."""

    def open(self, plan: Plan) -> PlannedExecutor:
        return warmed_up(super().open(replace(plan, prefill_chunk_tokens=CHUNK_TOKENS)))


class Watched:
    """Operations that write down how many rows they get. n_fail: whole chunks that find no memory, in the beginning."""

    def __init__(self, n_fail: int = 0) -> None:
        self.rows: list[int] = []
        self._real, self._n_fail = torch_operations(), n_fail

    def operations(self) -> GpuOperations:
        return replace(self._real, activate=self._activate)

    def _activate(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        self.rows.append(len(x))
        if len(x) == CHUNK_TOKENS and self._n_fail:
            self._n_fail -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return self._real.activate(x, *arguments, **options)


def on_gpu(model: Model, monkeypatch: pytest.MonkeyPatch, told: list[str], watched: Watched, **asked: Any) -> Opened:
    """Opened as the engine does, on this computer's stand-in of a GPU."""
    monkeypatch.setattr(cuda_machine, "CudaCopier", StandInCopier)
    monkeypatch.setattr(cuda_machine, "gpu_executor", marked_layers)
    monkeypatch.setattr(cuda_machine, "free_ram_bytes", lambda: PLENTY)
    gpu = stand_in_gpu(StandInCuda(PLENTY), watched.operations())
    placement = PlanRequest(reference_profile(LAPTOP), Limits(context_tokens=CONTEXT_TOKENS), chunked(model), **asked)
    return open_planned(*model, placement, 1, time.perf_counter, told.append, lambda name, warn: gpu)


def test_a_whole_chunk_and_a_row_of_decoding_pass(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    watched = Watched()
    found = on_gpu(model, monkeypatch, told, watched, traces=True)
    assert watched.rows == [CHUNK_TOKENS] * model[0].n_layers + [1] and told == []  # a chunk's other layers visit
    assert found.executor.cache.sequences == () and found.spans() == []
    found.executor.cache.check()
    found.executor.close()


def test_what_a_long_prompt_would_lack_is_told_at_opening(
    model: Model, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    found = on_gpu(model, monkeypatch, told, Watched(10**9))
    (warn,) = told
    assert "needs 2" in warn and warn.endswith("Continuing without the GPU.")
    assert generated(found.executor) == text
    found.executor.close()


@pytest.mark.parametrize("n_fail", [1, N_SMALLER, N_SMALLER + 1])
def test_smaller_plans_are_tried_before_the_gpu_is_done_without(model: Model, text: list[int], n_fail: int) -> None:
    told: list[str] = []
    asked_bytes: list[int] = []
    computer = Proving(model, operations=Watched(n_fail).operations())

    def replan(budget_bytes: int, context_tokens: int) -> Plan:
        asked_bytes.append(budget_bytes)
        return within(computer.replan(budget_bytes, context_tokens), budget_bytes)

    executor = ReplanningExecutor(chunked(model), replan, computer.open, told.append)
    assert generated(executor) == text
    executor.close()
    (warn,) = told
    assert ("Planned again within" in warn) == (n_fail <= N_SMALLER) == bool(executor.plan.n_bytes("gpu"))
    assert len(asked_bytes) == n_fail and asked_bytes[0] < plan_of(model).n_bytes("gpu")
    assert asked_bytes == sorted(set(asked_bytes), reverse=True)
    assert all(held == {} for held in computer.held_bytes())


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow, id="every"), pytest.param(5, id="some")])
@pytest.mark.parametrize("overrides", [HALF, STREAMED])
def test_memory_that_runs_out_at_any_step_of_the_pass(
    model: Model, text: list[int], overrides: Any, stride: int
) -> None:
    for n in itertools.count(1, stride):
        fault, told = Fault(n, no_memory, only_once=True), []
        computer = Proving(model, run=fault)
        executor = ReplanningExecutor(chunked(model, overrides), computer.replan, computer.open, told.append)
        n_proof = fault.calls
        assert executor.cache.sequences == () and executor.cache.n_bytes == unproven_bytes(model, executor.plan)
        assert generated(executor) == text
        executor.close()
        assert all(held == {} for held in computer.held_bytes())
        if n_proof < n:
            break
        assert len(told) == 1
    assert n > 5


def within(plan: Plan, budget_bytes: int) -> Plan:
    """The plan, as if its parts on the GPU were so small."""
    if not budget_bytes:
        return plan
    share = budget_bytes / plan.n_bytes("gpu")
    memory = tuple(replace(t, n_bytes=int(share * t.n_bytes)) if t.device == "gpu" else t for t in plan.memory)
    return replace(plan, vram_budget_bytes=budget_bytes, memory=memory)


def unproven_bytes(model: Model, plan: Plan) -> int:
    """Of the cache just after loading."""
    executor = Faulty(model).open(plan)
    n_bytes: int = executor.cache.n_bytes
    executor.close()
    return n_bytes


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_pass_that_is_broken_off_closes_everything(model: Model, error: Any) -> None:
    for n in itertools.count(1, 3):
        fault = Fault(n, lambda: error("a test's"), only_once=True)
        computer = Proving(model, run=fault)
        try:
            ReplanningExecutor(chunked(model, STREAMED), computer.replan, computer.open, lambda told: None).close()
        except error:
            assert fault.calls == n and len(computer.machines) == 1
        assert all(held == {} for held in computer.held_bytes())
        if fault.calls < n:
            break
    assert n > 5


def test_the_cpu_alone_is_left_as_it_is(model: Model) -> None:
    executor: Any = SimpleNamespace(plan=plan_of(model, (("layers.*|head", "cpu"),)))
    assert warmed_up(executor) is executor


def test_an_emulated_machine_begins_at_zero(model: Model, text: list[int]) -> None:
    placement = PlanRequest(
        reference_profile(LAPTOP), Limits(context_tokens=CONTEXT_TOKENS), chunked(model), emulates=True
    )
    found = open_planned(*model, placement, 1, time.perf_counter, lambda told: None)
    assert found.clock() == 0.0 and found.spans() == []
    assert generated(found.executor) == text
    found.executor.close()
