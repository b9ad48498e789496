"""The context of a plan where nobody asked for one: rates beside those of a short one, on the shipped profiles."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from hetero_ee.errors import UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.context import USUAL_TOKENS, grown
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.statistics import DraftRates, PromptReading, Statistics
from hetero_ee_profiles.reference import reference_profile
from tests.published_exits import published_statistics
from tests.shipped import MACHINES

LAPTOP = "rtx-4060-laptop-8gb"
DEPTH_TOKENS = 2048  # at which rates are compared
KEPT = 0.98


def spec_of(kind: str, hidden: int, ffn: int, layers: int, heads: int, vocabulary: int, context: int) -> ModelSpec:
    return read_spec(
        {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "vocab_size": vocabulary,
            "max_position_embeddings": context,
        }
    )


LLAMA_8B = spec_of("llama", 4096, 14336, 32, 32, 128256, 131072)
QWEN_14B = spec_of("qwen2", 5120, 13824, 48, 40, 152064, 32768)
LLAMA_70B = spec_of("llama", 8192, 28672, 80, 64, 128256, 131072)
MODELS = {"llama-3.1-8b": LLAMA_8B, "qwen2.5-14b": QWEN_14B, "llama-3.1-70b": LLAMA_70B}


def rate(spec: ModelSpec, hardware: str, context_tokens: int, statistics: Statistics | None = None) -> float:
    """Tokens per second of a text after DEPTH_TOKENS."""
    limits = Limits(context_tokens=context_tokens)
    made = plan(spec, reference_profile(hardware), limits, statistics, predict_at_tokens=DEPTH_TOKENS)
    return made.prediction.generated_tokens_per_s


@pytest.mark.parametrize("hardware", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_the_chosen_context_costs_no_speed_and_a_doubled_one_would(model: str, hardware: str) -> None:
    spec, profile = MODELS[model], reference_profile(hardware)
    made = plan(spec, profile, predict_at_tokens=DEPTH_TOKENS)
    usual, chosen = rate(spec, hardware, USUAL_TOKENS), made.prediction.generated_tokens_per_s
    print(f"{model:14} {hardware:20} {made.context_tokens:7} tokens {chosen:7.2f} t/s, -c 4096 {usual:7.2f} t/s")
    assert made.context_tokens >= USUAL_TOKENS and chosen >= KEPT * usual
    if made.context_tokens == spec.max_context_tokens:
        assert not any(reason.startswith("Context ") for reason in made.reasons)
        return
    assert made.reasons[0].startswith(f"Context {made.context_tokens:,} tokens, chosen because -c ")
    try:
        assert rate(spec, hardware, 2 * made.context_tokens) < KEPT * usual
    except UsageError:
        assert "does not fit" in made.reasons[0]


@pytest.mark.parametrize("acceptance", [(0.5, 0.4), (0.6, 0.5)])
def test_a_draft_head_that_reads_prompts_costs_no_context_its_speed(acceptance: tuple[float, ...]) -> None:
    """What keeps the text's rate alone may take several times as long for a typical request."""
    rates = DraftRates("a head", acceptance, 0.004, PromptReading(lambda m, n_context: 0.003 * m))
    known = Statistics(drafts=rates)
    made, usual = (
        plan(LLAMA_8B, reference_profile(LAPTOP), Limits(context_tokens=size), known, predict_at_tokens=DEPTH_TOKENS)
        for size in (0, USUAL_TOKENS)
    )
    assert made.prediction.generated_tokens_per_s >= KEPT * usual.prediction.generated_tokens_per_s
    assert KEPT * made.prediction.request_s <= usual.prediction.request_s


@pytest.mark.parametrize("hardware", [LAPTOP, "rtx-3060-12gb"])
def test_the_plan_is_that_of_the_context_asked_for(hardware: str) -> None:
    """So that what `plan` prints with -c is the plan that generate makes without."""
    profile, statistics = reference_profile(hardware), Statistics(published_statistics(LLAMA_8B.n_layers))
    chosen = plan(LLAMA_8B, profile, Limits(), statistics)
    asked = plan(LLAMA_8B, profile, Limits(context_tokens=chosen.context_tokens), statistics)
    assert replace(chosen, reasons=chosen.reasons[1:]) == asked


def test_the_reason_says_what_more_would_cost() -> None:
    made = plan(QWEN_14B, reference_profile(LAPTOP), predict_at_tokens=DEPTH_TOKENS)
    whole, chosen = rate(QWEN_14B, LAPTOP, 32768), rate(QWEN_14B, LAPTOP, made.context_tokens)
    assert made.reasons[0] == (
        f"Context {made.context_tokens:,} tokens, chosen because -c 32768, the model's own, would run at {whole:.3g} "
        f"instead of {chosen:.3g} tokens/s after {DEPTH_TOKENS:,} tokens; without -c it grows when a text needs it."
    )
    asked = plan(QWEN_14B, reference_profile(LAPTOP), Limits(context_tokens=made.context_tokens))
    assert not any(reason.startswith("Context ") for reason in asked.reasons)


def test_where_little_fits_the_context_is_short() -> None:
    """All layers are pinned to a card that they nearly fill."""
    profile = reference_profile(LAPTOP)
    spec = spec_of("llama", 4096, 14336, 32, 32, 128256, 4096)
    everything = Limits(gpu_layers=32, vram_margin_bytes=0)
    needed = next(n for n in range(30, 80) if fits(spec, replace(everything, vram_budget_bytes=n * 2**27), 512))
    tight = replace(everything, vram_budget_bytes=needed * 2**27)
    made = plan(spec, profile, tight)
    assert 256 <= made.context_tokens < 4096
    assert made.reasons[0].startswith(f"Context {made.context_tokens:,} tokens, chosen because -c 4096, the model's ")
    with pytest.raises(UsageError, match="what is pinned to the GPU needs"):
        plan(spec, profile, replace(everything, vram_budget_bytes=2**30))


def fits(spec: ModelSpec, limits: Limits, context_tokens: int) -> bool:
    try:
        plan(spec, reference_profile(LAPTOP), replace(limits, context_tokens=context_tokens))
    except UsageError:
        return False
    return True


@pytest.mark.sample(0)
def test_choosing_takes_no_more_than_five_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_ee.planning import context

    n_plans, real = 0, context.best_candidate

    def counted(*arguments: object) -> object:
        nonlocal n_plans
        n_plans += 1
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(context, "best_candidate", counted)
    for hardware in MACHINES:
        n_plans, start_s = 0, time.process_time()
        plan(LLAMA_70B, reference_profile(hardware))
        print(f"80 layers on {hardware}: {n_plans} plans, {time.process_time() - start_s:.2f} s of CPU time")
        assert n_plans <= 5


def planner(most_tokens: int) -> tuple[Callable[[int], Plan], list[int]]:
    """Plans up to so many tokens, and what was asked for."""
    made, asked = plan(QWEN_14B, reference_profile(LAPTOP), Limits(context_tokens=512)), list[int]()

    def plan_for(context_tokens: int) -> Plan:
        asked.append(context_tokens)
        if context_tokens > most_tokens:
            raise UsageError("no room.")
        return replace(made, context_tokens=context_tokens)

    return plan_for, asked


@pytest.mark.parametrize(
    ("room", "present", "needed", "own", "expected"),
    [
        (10**6, 4096, 4097, 131072, 8192),  # doubled
        (10**6, 4096, 10001, 131072, 16384),  # as often as needed
        (10**6, 4096, 16380, 131072, 32768),  # with room for a text behind a prompt
        (10**6, 4096, 4097, 5000, 5000),  # at most the model's own
        (7000, 4096, 4097, 131072, 6144),  # less where that does not fit
        (5200, 4096, 4097, 131072, 5120),
        (10500, 4096, 10001, 131072, 10240),  # at last what is needed, rounded up
        (4300, 4096, 4097, 131072, None),
        (10**6, 4096, 5001, 5000, None),
    ],
)
def test_a_context_grows_by_what_fits(room: int, present: int, needed: int, own: int, expected: int | None) -> None:
    plan_for, asked = planner(room)
    found = grown(plan_for, present, needed, own)
    assert (None if found is None else found.context_tokens) == expected
    assert len(asked) <= 4
