"""What the planner predicts is what the emulated machine takes: the same profile, otherwise nothing in common."""

from statistics import median
from typing import Any

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.times.prediction import predicted_run_s
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.timeline import Timeline
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_names, reference_profile
from tests.drawn_plans import drawn
from tests.emulation import dummy, planned, prompt_of

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


@pytest.mark.few(7)
@pytest.mark.parametrize("hardware", reference_names())
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


@pytest.mark.parametrize("kinds", [("stream",), ("gpu", "stream"), ("cpu", "stream"), ("cpu", "gpu")], ids="+".join)
def test_a_run_behind_others_has_the_same_rate(kinds: tuple[str, ...]) -> None:
    """Tokens behind a text that is there: copies begin cold, and the rest is as behind a prompt."""
    case = drawn(1000, kinds)
    _, decode_s = times(case.spec, case.plan, case.profile, 200)
    alone_s = predicted_run_s(case.spec, case.profile, case.plan, 0, N_NEW, 200)
    assert alone_s == pytest.approx(decode_s, rel=PROMISED)
