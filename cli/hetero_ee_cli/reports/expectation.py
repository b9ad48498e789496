"""The speed expected of a text, from this machine's profile: printed next to the measured one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.engine import Engine

SLOW = 0.5  # of the expected speed; predictions are never that far off
MIN_S, MIN_TOKENS = 1.0, 8  # of a text long enough to judge the speed by


def expected_rate(engine: "Engine", result: "GenerationResult") -> float | None:
    """Return the tokens per second that the plan should reach for this text.

    None if nothing was planned, if there is no profile, if the quality of the drafts is unknown, or if the context grew
    meanwhile.
    """
    from hetero_ee.planning.times.prediction import predicted_text_s

    made, placement = engine.plan, engine.plan_request
    if made is None or placement is None or placement.profile is None:
        return None
    first, last = result.n_prompt_tokens, result.n_prompt_tokens + result.n_generated_tokens
    growth = engine.executor.growth  # which reads the text again
    if growth is not None and any(first <= size <= last for size in growth.outgrown):
        return None
    counts = result.n_generated_tokens, result.n_prompt_tokens
    seconds = predicted_text_s(engine.spec, placement.profile, made, placement.statistics, *counts)
    return None if seconds is None else result.n_generated_tokens / seconds


def slowness(result: "GenerationResult", expected: float | None, uses_gpu: bool) -> list[str]:
    """Return a sentence if the text needed more than twice the expected time, else None."""
    rate = result.generated_tokens_per_s
    if expected is None or result.generation_s < MIN_S or result.n_generated_tokens < MIN_TOKENS:
        return []
    if rate >= SLOW * expected:
        return []
    spilled = ", or the GPU driver may have moved some of its memory to system RAM" if uses_gpu else ""
    remedy = "Lower --vram-budget" if uses_gpu else "Close it"
    return [
        f"This text ran at {rate:.1f} tokens/s, less than half of the expected {expected:.1f}: another program may be "
        f"busy{spilled}. {remedy}, or measure again with hetero-ee profile --refresh."
    ]
