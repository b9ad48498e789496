"""Mixtures of experts in any placement: the CPU's very tokens, the same steps on emulated and stand-in GPUs."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch

from hetero_ee import Engine, UsageError
from hetero_ee.calibration.routes import route_shapes
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.runtime.executors.executor import Executor, HostExecutor
from hetero_ee.runtime.opening import open_planned
from hetero_ee.sparsity.expert_order import ExpertOrder
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from hetero_ee_profiles.reference import reference_profile
from tests.bad_models import leftovers
from tests.emulation import LAPTOP, emulated, planned, prompt_of
from tests.executor_support import Model, on_kernels
from tests.families import random_model, save_checkpoint
from tests.logged_machine import Log
from tests.stand_in_machine import on_stand_in, stand_in_gpu, torch_operations

SIZES = {"num_experts": 32, "num_experts_per_tok": 4}
MORE = {"gemma4-moe": {"top_k_experts": 4}}
STREAMED = "streamed for prompts"  # of one of two layers, also one whose first experts are on the GPU
ON_DISK = "experts on the disk"
PLACES = {
    ON_DISK: ((r"layers\.0\.moe", "hot-5"), (".*moe", "hot-0"), (".*", "gpu")),
    STREAMED: ((r"layers\.0\.moe", "hot-5"), (".*moe", "hot-0"), (".*", "gpu")),
    "no experts on the GPU": ((".*moe", "hot-0"), (".*", "gpu")),
    "layers split differently": ((r"layers\.0\.moe", "hot-5"), (r"layers\.2\.moe", "hot-31"), (".*", "gpu")),
    "all on the GPU": (("layers.*|head", "gpu"),),
    "experts on the CPU": ((".*moe", "cpu"), (".*", "gpu")),
    "streamed": ((".*moe", "stream"), (".*", "gpu")),
}
TEXT = [1, 17, 30, 3, 99, 42, 7, 12, 9, 31, 5, 61, 8, 2, 77, 4, 23, 50, 6, 88, 19, 11]
PROMPT = 18  # tokens; more than a step may have


def made(family: str, folder: Path) -> Model:
    save_checkpoint(random_model(family, **SIZES | MORE.get(family, {})), folder)
    spec = read_spec(folder)
    return spec, open_store(convert(folder, spec, folder / "store", Quantization(matrices="rtn")), spec)


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3.5-moe", "gpt-oss", "gemma4-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Experts with biases, and a router with one."""
    return made("gpt-oss", tmp_path_factory.mktemp("ordered"))


def placed(spec: ModelSpec, places: str) -> Plan:
    plan = planned(spec, overrides=PLACES[places], context_tokens=64, kv_type="fp32")
    if places == ON_DISK:
        places_of = ((part, part.decode_placement.from_disk) for part in plan.parts if part.kind == "moe")
        moved = {part: replace(part, decode_placement=place, prefill_placement=place) for part, place in places_of}
        return replace(plan, parts=tuple(moved.get(part, part) for part in plan.parts))
    if places != STREAMED:
        return plan
    moes = [part for part in plan.parts if part.kind == "moe"]
    parts = (replace(part, prefill_placement="visit") if part in moes[::2] else part for part in plan.parts)
    return replace(plan, parts=tuple(parts))


def kernels_cpu(spec: ModelSpec, weights: ModelWeights, cache: KvCache) -> HostExecutor:
    return CpuExecutor(spec, weights, cache.max_tokens, 1, cache=cache)


def read(executor: Executor) -> torch.Tensor:
    """Logits of a text: its first tokens as a prompt, one by itself, and the others together."""
    sequence = executor.cache.open_new()
    rows = [executor.prompt(prompt_of(executor, sequence, TEXT[:PROMPT]))[None]]
    for first, end in ((PROMPT, PROMPT + 1), (PROMPT + 1, len(TEXT))):
        rows.append(executor.logits(Batch.of_sequence(sequence, first, TEXT[first:end]), range(end - first)))
    executor.close()
    return torch.cat(rows).as_subclass(torch.Tensor)


@pytest.mark.parametrize("places", PLACES)
def test_logits_are_the_cpu_s_bit_by_bit(model: Model, places: str, kernels: Path) -> None:
    plan = placed(model[0], places)
    assert torch.equal(read(emulated(*model, plan)), read(on_kernels(model)))


@pytest.mark.parametrize("places", PLACES)
def test_experts_in_order_of_popularity_give_the_same_tokens_in_any_placement(
    gpt_oss: Model, places: str, kernels: Path
) -> None:
    spec, weights = gpt_oss
    draw = np.random.default_rng(0)
    order = ExpertOrder.of(spec, {name: draw.random(shape) for name, shape in route_shapes(spec).items()})
    assert order is not None
    ordered = order.applied(spec, weights)
    plan = placed(ordered[0], places)
    found = read(emulated(*ordered, plan))
    assert torch.equal(found, read(on_kernels(ordered)))
    assert torch.equal(found.argmax(1), read(on_kernels(gpt_oss)).argmax(1)), "the order changes tokens"


@pytest.mark.parametrize("places", PLACES)
def test_a_gpu_runs_the_steps_that_are_emulated(model: Model, places: str, kernels: Path) -> None:
    plan = placed(model[0], places)
    log, charged, gpu = Log(), Log(), stand_in_gpu(operations=torch_operations())
    found = read(on_stand_in(*model, plan, gpu, wrap=log.machine, make_cpu=kernels_cpu))
    expected = read(on_kernels(model))
    assert (found - expected).norm() < 0.01 * expected.norm()
    read(emulated(*model, plan, wrap=charged.machine))
    assert charged.names == log.names, "an emulated GPU is charged for other steps"


def test_experts_that_a_model_lacks_are_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_EE_CACHE_DIR", str(tmp_path / "cache"))
    folder = save_checkpoint(random_model("llama"), tmp_path / "model")
    with pytest.raises(UsageError, match="this model has none"):
        Engine.from_pretrained(folder, cpu_moe=True, profile=reference_profile("rtx-3060-12gb"))
    assert leftovers(tmp_path / "cache") == []


def test_a_model_larger_than_ram_runs_from_the_disk_and_says_so(
    gpt_oss: Model, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("hetero_ee.ops.cpu.read_ahead", lambda rows, first, end: asked.append((first, end)))
    spec, weights = gpt_oss
    warnings: list[str] = []
    profile = reference_profile(LAPTOP)

    def opened(**limits: int) -> torch.Tensor:
        every = Limits(context_tokens=64, kv_type="fp32", gpu_layers=0, mode="full", **limits)  # type: ignore[arg-type]
        request = PlanRequest(limits=every, profile=profile)
        found = open_planned(spec, weights, request, 1, perf_counter, warnings.append)
        return read(found.executor)

    whole = opened()
    assert not asked and not warnings
    budget = make_plan(spec, profile, Limits(context_tokens=64, kv_type="fp32", gpu_layers=0)).n_bytes("cpu")
    assert torch.equal(opened(ram_budget_bytes=budget - weights.n_bytes // 2), whole)
    [said] = warnings
    assert "read from the disk" in said and "tokens/s are expected" in said
    rows = {
        weights.matrices[f"layers.{n}.moe.{short}"].tiles.shape[0] for n in range(2) for short in ("gate_up", "down")
    }
    assert asked and all(0 <= first < end <= max(rows) for first, end in asked)
