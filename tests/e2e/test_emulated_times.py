"""What the planner predicts is what the emulated machine takes: the same profile, otherwise nothing in common."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from torch import Tensor

from hetero_ee.decoding.requests import Ending
from hetero_ee.errors import UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.prediction import predicted_run_s
from hetero_ee.runtime.devices.device import CPU
from hetero_ee.runtime.devices.timeline import TO_GPU, Timeline
from hetero_ee.runtime.executors.dummy import DummyExecutor
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_costs import HeadCosts
from hetero_ee.speculation.sources.draft_head_file import DraftHeadFacts
from hetero_ee.speculation.sources.draft_head_layer import DraftHeadLayer
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_profile
from tests.drafted_generation import generate_exact
from tests.drawn_plans import Drawn, drawn
from tests.emulation import dummy, planned, prompt_of
from tests.shipped import DATA_SHEETS, MACHINES

N_PROMPT, N_NEW, CONTEXT_TOKENS = 1024, 16, 2048
PROMISED, USUAL, MEDIAN = 0.05, 0.02, 1e-3  # differences: of any run, of those here, of half of them
MODELS = ("tinyllama-1.1b", "llama-2-7b", "llama-2-13b", "llama-3-8b")
LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"vram_budget_bytes": 2 * 2**30},
    {"vram_budget_bytes": 4 * 2**30},
    {"gpu_layers": 0},
    {"overrides": ((".*ffn", "stream"),)},
    {"overrides": ((r"layers\.\d*[02468]\.ffn", "cpu"), ("layers.*", "gpu"))},
    {"vram_budget_bytes": 3 * 2**30, "overrides": ((r"layers\.[4-9]\..*", "stream"),)},
    {"vram_budget_bytes": 2 * 2**30, "kv_type": "int8"},
    {"gpu_layers": 6, "overrides": (("head", "cpu"),)},  # prompts visit the GPU all the same
)


def times(spec: ModelSpec, plan: Plan, profile: HardwareProfile, n_prompt: int) -> tuple[float, float]:
    """Emulated seconds of the prompt, and of the tokens behind it."""
    timeline = Timeline()
    executor = dummy(spec, plan, profile, timeline)
    sequence = executor.cache.open_new()
    executor.prompt(prompt_of(executor, sequence, [0] * n_prompt))
    prompt_s = timeline.now_s
    for position in range(n_prompt, n_prompt + N_NEW):
        executor.logits(Batch((0,), (sequence,), (position,)), (0,))
    return prompt_s, timeline.now_s - prompt_s


def differences(spec: ModelSpec, plan: Plan, profile: HardwareProfile, n_prompt: int, name: str) -> list[float]:
    """Of prediction and emulation, of the prompt and of the tokens behind it; none is beyond what is promised."""
    prompt_s, decode_s = times(spec, plan, profile, n_prompt)
    expected_s = predicted_run_s(spec, profile, plan, n_prompt, 0, 0)
    more_s = predicted_run_s(spec, profile, plan, n_prompt, N_NEW, 0) - expected_s
    found = [abs(expected_s / prompt_s - 1), abs(more_s / decode_s - 1)]
    assert max(found) < PROMISED, f"{name}: prompt {found[0]:.3f}, decoding {found[1]:.3f}"
    return found


def check(found: list[float]) -> None:
    print(f"{len(found)} times: worst difference {max(found):.2e}, median {median(found):.1e}")
    assert max(found) < USUAL and median(found) < MEDIAN


@pytest.mark.sample(2)
@pytest.mark.few(7)
@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_prediction_and_emulation_agree(model: str, hardware: str) -> None:
    spec, profile = known_spec(model), reference_profile(hardware)
    found = []
    for limits in LIMITS:
        kept = {"kv_type": "fp16", "context_tokens": CONTEXT_TOKENS} | limits
        try:
            plan = planned(spec, hardware, N_PROMPT, **kept)
        except UsageError:  # more than this machine has
            continue
        found += differences(spec, plan, profile, N_PROMPT, str(limits))
    assert len(found) >= 6
    check(found)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "first, n_plans", [(0, 30), pytest.param(30, 400, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_plans_drawn_at_random_take_what_is_predicted(first: int, n_plans: int) -> None:
    found = []
    for seed in range(first, first + n_plans):
        case = drawn(seed)
        n_prompt = 100 if seed % 2 else 520
        found += differences(case.spec, case.plan, case.profile, n_prompt, case.name)
    check(found)


class NoNumbers(DummyExecutor):
    """A draft head that computes nothing."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x[:, x.shape[1] // 2 :]


def with_a_head(case: Drawn, n_prompt: int, on_gpu: bool) -> tuple[float, float, float]:
    """Seconds of a prompt that a draft head reads too: emulated, predicted, and what the host spends on reading."""
    timeline, head_spec = Timeline(), replace(case.spec, n_layers=1, sliding_windows=(None,))
    executor = dummy(case.spec, case.plan, case.profile, timeline)
    layer = DraftHeadLayer(NoNumbers(head_spec, n_prompt), head_spec, None, executor.machine, on_gpu=on_gpu)
    how = Drafting(0, 2, FixedThreshold(0.0), None, (DraftHeadSource(lambda: layer, executor),))
    options: Any = SamplingParams(1), Ending(frozenset(), n_prompt + 1), str, lambda: timeline.now_s, how
    (token,) = generate_exact(executor, [[0] * n_prompt], *options, counts := DraftCounts())

    facts = DraftHeadFacts(head_spec, case.spec.vocab_size, False, (0.5,))
    rates = HeadCosts(facts, case.spec, case.profile, 0).rates("a head")
    reading = rates.by_gpu.reading if on_gpu and rates.by_gpu else rates.reading
    expected_s = predicted_run_s(case.spec, case.profile, case.plan, n_prompt, 0, 0, reading)
    return token.elapsed_s, expected_s, counts.statistics(1, 0).prompt_s["draft head"]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("kinds", [("cpu",), ("gpu",), ("gpu", "cpu"), ("cpu", "stream")], ids="+".join)
def test_a_draft_heads_part_of_a_prompt(kinds: tuple[str, ...], on_gpu: bool) -> None:
    found = []
    for seed in range(6):
        case, n_prompt = drawn(seed, kinds), 1500
        has_gpu = case.plan.n_bytes("gpu") > 0
        prompt_s, expected_s, read_s = with_a_head(case, n_prompt, on_gpu and has_gpu)
        assert expected_s > predicted_run_s(case.spec, case.profile, case.plan, n_prompt, 0, 0)
        assert (read_s > 0) == (not (on_gpu and has_gpu))  # by the GPU while the host goes on
        found.append(abs(expected_s / prompt_s - 1))
        assert found[-1] < PROMISED, f"{case.name}: {found[-1]:.3f}"
    assert max(found) < USUAL and median(found) < 2 * MEDIAN  # the head reads a chunk in pieces of its own


@pytest.mark.parametrize("kinds", [("stream",), ("gpu", "stream"), ("cpu", "stream"), ("cpu", "gpu")], ids="+".join)
def test_a_run_behind_others_has_the_same_rate(kinds: tuple[str, ...]) -> None:
    """Tokens behind a text that is there: copies begin cold, and the rest is as behind a prompt."""
    case = drawn(1000, kinds)
    _, decode_s = times(case.spec, case.plan, case.profile, 200)
    alone_s = predicted_run_s(case.spec, case.profile, case.plan, 0, N_NEW, 200)
    assert alone_s == pytest.approx(decode_s, rel=PROMISED)


@pytest.mark.parametrize("hardware", MACHINES)
def test_the_cpu_and_copies_at_once_read_no_more_than_the_ram_gives(hardware: str) -> None:
    spec, profile, timeline = known_spec("llama-2-7b"), reference_profile(hardware), Timeline()
    pins = (r"layers\.\d*[02468]\.ffn", "stream"), ("layers.*", "cpu")
    made = planned(spec, hardware, context_tokens=CONTEXT_TOKENS, kv_type="fp16", overrides=pins)
    executor = dummy(spec, made, profile, timeline)
    sequence = executor.cache.open_new()
    for position in range(3):
        executor.logits(Batch((0,), (sequence,), (position,)), (0,))
    n_bytes = {part.name: part.weight_bytes for part in made.parts}
    lanes = {lane: [span for span in timeline.spans if span.lane == lane] for lane in (CPU, TO_GPU)}
    pairs = [(a, b) for a in lanes[CPU] for b in lanes[TO_GPU] if a.start_s < b.end_s and b.start_s < a.end_s]
    assert len(pairs) > 2 * spec.n_layers
    for pair in pairs:
        assert sum(n_bytes[span.name] / (span.end_s - span.start_s) for span in pair) < rated(profile)


def rated(profile: HardwareProfile) -> float:
    """Bytes per second of the RAM."""
    return 1.001 * next(sheet.ram_gb_s for sheet in DATA_SHEETS if sheet.name == profile.name) * 1e9
