"""Plans on a real GPU: the CPU's tokens, the same bits in any company, nothing left behind, and the promised speed."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.config import cache_folder, data_folder
from hetero_ee.decoding.benchmark import Bench
from hetero_ee.decoding.loop import generate
from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import DeviceMemoryError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.profiling.machine_profile import Wanted, machine_profile
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.opening import open_on_cpu, open_planned
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee_profiles.hardware import HardwareProfile
from tests.drafted_generation import generate_exact
from tests.emulation import prompt_of
from tests.executor_support import Model, model_of
from tests.placements import (
    ALL_GPU,
    CONTEXT_TOKENS,
    PLACEMENTS,
    PROMPT,
    assert_rows_keep_their_bits,
    assert_same,
    computed_and_stored,
    visiting,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

N_TOKENS = 32
MIN_TOP1, MAX_KL = 0.995, 5e-4
CLEAR_GAP = 0.05  # between the two likeliest tokens' logits: below it, rounding may decide


@pytest.fixture(scope="module")
def demo_profile(demo: Path) -> HardwareProfile:
    return profile_for(read_spec(demo))


def profile_for(spec: ModelSpec) -> HardwareProfile:
    wanted = Wanted(quick=True, refresh=False, threads=(1,), command="tests/gpu/test_plans_on_gpu.py")
    folders = {"data_folder": data_folder(), "cache_folder": cache_folder(), "disk_file": None}
    return machine_profile(spec, wanted, clock=time.perf_counter, **folders)


@pytest.fixture(scope="module", params=["llama-tied", "qwen2-window", "qwen3", "opt", "phi3-partial"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, "int4", tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def profile(demo_profile: HardwareProfile) -> HardwareProfile:
    """Where parts go is pinned: another model's times do."""
    return demo_profile


Open = Callable[..., Executor]


@pytest.fixture
def opened(model: Model, profile: HardwareProfile) -> Iterator[Open]:
    """Opens the model in a placement; everything is closed at the end."""
    executors = []

    def open_in(overrides: Any, visits: bool = False, kv_type: str = "fp32") -> Executor:
        limits = Limits(overrides=overrides, context_tokens=CONTEXT_TOKENS, kv_type=kv_type)
        plan = make_plan(model[0], profile, limits)
        placement = PlanRequest(profile, limits, visiting(plan) if visits else plan)
        executors.append(open_planned(*model, placement, 1, time.perf_counter, lambda told: None).executor)
        return executors[-1]

    yield open_in
    for executor in executors:
        executor.close()


def told_tokens(executor: Executor, given: list[int]) -> torch.Tensor:
    """Logits (1 + len(given), vocab) behind the prompt and each of the given tokens, one pass each."""
    sequence = executor.cache.open_new()
    found = [executor.prompt(prompt_of(executor, sequence, PROMPT))]
    for token in given:
        batch = Batch.of_sequence(sequence, executor.cache.length(sequence), [token])
        found.append(executor.logits(batch, [0])[0])
    executor.cache.check()
    executor.cache.close(sequence)
    return torch.stack(found).float()


def greedy(executor: Executor) -> list[int]:
    tokens: list[int] = []
    sequence = executor.cache.open_new()
    logits = executor.prompt(prompt_of(executor, sequence, PROMPT))
    for _ in range(N_TOKENS):
        tokens.append(int(logits.argmax()))
        logits = executor.logits(Batch.of_sequence(sequence, executor.cache.length(sequence), tokens[-1:]), [0])[0]
    executor.cache.close(sequence)
    return tokens


@pytest.mark.parametrize("placement", [*sorted(PLACEMENTS), "visiting"])
def test_the_cpus_tokens_come_out_of_every_placement(model: Model, opened: Open, placement: str) -> None:
    cpu = open_on_cpu(*model, CONTEXT_TOKENS, 1)
    tokens = greedy(cpu)
    expected = told_tokens(cpu, tokens)
    cpu.close()
    name = "head alone on the GPU" if placement == "visiting" else placement
    found = told_tokens(opened(PLACEMENTS[name], placement == "visiting"), tokens)
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > CLEAR_GAP
    assert int(is_clear.sum()) > N_TOKENS // 2
    assert torch.equal(found.argmax(1)[is_clear], expected.argmax(1)[is_clear])


@pytest.mark.parametrize("placement", ["all on the GPU", "attention and FFN apart", "streamed"])
def test_a_row_has_the_same_bits_whatever_m_is(opened: Open, placement: str) -> None:
    """Also by a recorded graph."""
    assert_rows_keep_their_bits(opened(PLACEMENTS[placement]), (0, 3, 0))


def test_asynchronous_drafting_changes_no_token(opened: Open) -> None:
    """The GPU has the guesses in its layer while the CPU verifies the tokens before: one, and two."""
    executor, counts = opened(PLACEMENTS["split"]), DraftCounts()
    params = SamplingParams(100, temperature=0.7, seed=2, top_k=8)
    common: Any = executor, [PROMPT], params, Ending(frozenset(), CONTEXT_TOKENS), str, lambda: 0.0
    expected = list(generate(*common))
    for threshold in (2.0, 0.0):
        how = Drafting(1, 2, FixedThreshold(threshold), DraftEnd(), async_layers=1)
        assert list(generate_exact(*common, how, counts)) == expected
        executor.cache.check()
    assert 0 < counts.n_ahead_kept < counts.n_ahead


@pytest.mark.parametrize("kv_type", ["fp32", "fp16", "int8"])
def test_visiting_attentions_compute_and_store_what_resident_ones_do(opened: Open, kv_type: str) -> None:
    resident = opened(ALL_GPU, kv_type=kv_type)
    visits = opened(PLACEMENTS["head alone on the GPU"], True, kv_type)
    assert_same(computed_and_stored(visits), computed_and_stored(resident))


def test_closing_gives_the_memory_back(model: Model, profile: HardwareProfile) -> None:
    limits = Limits(overrides=PLACEMENTS["streamed"], context_tokens=CONTEXT_TOKENS)
    held = []
    for _ in range(3):
        opened = open_planned(*model, PlanRequest(profile, limits), 1, time.perf_counter, lambda told: None)
        greedy(opened.executor)
        opened.executor.close()
        del opened
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2]


def test_a_gpu_that_runs_out_of_memory_leaves_the_text_as_it_is(
    model: Model, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth pass over the GPU's layers finds no memory: planned again, and the same tokens."""
    from hetero_ee.runtime.executors.gpu import GpuExecutor

    limits, told = Limits(overrides=PLACEMENTS["split"], context_tokens=CONTEXT_TOKENS), []
    found = open_planned(*model, PlanRequest(profile, limits), 1, time.perf_counter, told.append)
    expected = greedy(found.executor)
    calls, forward = [0], GpuExecutor.forward

    def failing(self: GpuExecutor, *arguments: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 5:
            torch.empty(2**45, dtype=torch.uint8, device="cuda")
        return forward(self, *arguments)

    monkeypatch.setattr(GpuExecutor, "forward", failing)
    try:
        assert greedy(found.executor) == expected
    except DeviceMemoryError as error:
        pytest.fail(f"not planned again: {error}")
    assert len(told) == 1 and "Planned again" in told[0]
    found.executor.close()


def test_the_demo_model_on_the_gpu_agrees_with_the_cpu(demo: Path, demo_profile: HardwareProfile) -> None:
    """Teacher-forced over a text of the model's own, keys and values in fp16."""
    options: dict[str, Any] = {"threads": 1, "context_tokens": 512}
    with Engine.from_pretrained(demo, **options) as engine:
        text = engine.generate("Once upon a time", max_new_tokens=400, stop=()).token_ids
        expected = logits_of(engine.executor, list(text))
    limits = Limits(overrides=ALL_GPU, kv_type="fp16", context_tokens=512)
    with Engine.from_pretrained(demo, profile=demo_profile, limits=limits, **options) as engine:
        found = logits_of(engine.executor, list(text))
    top1 = float((found.argmax(1) == expected.argmax(1)).float().mean())
    logs = torch.log_softmax(expected.double(), 1), torch.log_softmax(found.double(), 1)
    kl = float((logs[0].exp() * (logs[0] - logs[1])).sum(1).mean())
    assert top1 >= MIN_TOP1 and kl <= MAX_KL, (top1, kl)


def logits_of(executor: Executor, token_ids: list[int]) -> torch.Tensor:
    sequence = executor.cache.open_new()
    batch = Batch.of_sequence(sequence, 0, token_ids)
    logits = executor.to_logits(executor.hidden(batch)).float().cpu()
    executor.cache.close(sequence)
    return logits


def test_predicted_beside_achieved(
    demo: Path, demo_profile: HardwareProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    """No bound: a small model's passes are overheads alone. Printed, to be looked at."""
    n_layers = read_spec(demo).n_layers
    for gpu_layers in (n_layers, n_layers // 2, 1):
        limits = Limits(gpu_layers=gpu_layers, kv_type="fp16")
        with Engine.from_pretrained(demo, profile=demo_profile, limits=limits, threads=1, context_tokens=256) as engine:
            plan = engine.plan
            assert plan is not None and plan.gpu_layers == gpu_layers
            run = Bench(engine.executor, 3, time.perf_counter).run(0, 64, 64, chunk_tokens=64)
        expected = plan.prediction.generated_tokens_per_s
        with capsys.disabled():
            print(f"\n{gpu_layers} layers on the GPU: {expected:.0f} tokens/s predicted, {run.avg_ts:.0f} achieved")
        assert run.avg_ts > 0
