"""What the planner predicts is what the emulated machine takes: the same profile, otherwise nothing in common."""

from typing import Any

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.prediction import predicted_run_s
from hetero_ee.runtime.rows import Rows
from hetero_ee.runtime.timeline import Timeline
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.reference import reference_names, reference_profile
from tests.emulation import hollow, planned, prompt_of

N_PROMPT, N_NEW, CONTEXT_TOKENS = 1024, 16, 2048
MODELS = ("tinyllama-1.1b", "llama-2-7b", "llama-2-13b", "llama-3-8b")
LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"vram_budget_bytes": 2 * 2**30},
    {"vram_budget_bytes": 4 * 2**30},
    {"gpu_layers": 0},
    {"overrides": ((".*ffn", "stream"),)},
    {"overrides": ((r"layers\.\d*[02468]\.ffn", "cpu"), ("layers.*", "gpu"))},
)


def times(spec: ModelSpec, plan: Plan, profile: HardwareProfile) -> tuple[float, float]:
    """Emulated seconds of the prompt, and of the tokens behind it."""
    timeline = Timeline()
    executor = hollow(spec, plan, profile, timeline)
    sequence = executor.cache.open_new()
    executor.prompt(prompt_of(executor, sequence, [0] * N_PROMPT))
    prompt_s = timeline.now_s
    for position in range(N_PROMPT, N_PROMPT + N_NEW):
        executor.logits(Rows((0,), (sequence,), (position,)), (0,))
    return prompt_s, timeline.now_s - prompt_s


@pytest.mark.parametrize("hardware", reference_names())
@pytest.mark.parametrize("model", MODELS)
def test_prediction_and_emulation_agree_within_five_percent(model: str, hardware: str) -> None:
    spec, profile, n_plans = known_spec(model), reference_profile(hardware), 0
    for limits in LIMITS:
        try:
            plan = planned(spec, hardware, N_PROMPT, context_tokens=CONTEXT_TOKENS, kv_type="fp16", **limits)
        except UsageError:  # more than this machine has
            continue
        prompt_s, decode_s = times(spec, plan, profile)
        assert predicted_run_s(spec, profile, plan, N_PROMPT, 0, 0) == pytest.approx(prompt_s, rel=0.05), limits
        assert predicted_run_s(spec, profile, plan, 0, N_NEW, N_PROMPT) == pytest.approx(decode_s, rel=0.05), limits
        n_plans += 1
    assert n_plans >= 3
