"""The speed expected of a text, from this machine's profile: printed next to the measured one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hetero_ee.config import Progress
from hetero_ee.errors import UsageError
from hetero_ee_cli.terminal.progress import stage_progress

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.engine import Engine

SLOW = 0.5  # of the expected speed; predictions are never that far off
MIN_S, MIN_TOKENS = 1.0, 8  # of a text long enough to judge the speed by
Rate = Callable[[int, int], float | None]  # (prompt tokens, new tokens) -> tokens per second


class Expectation:
    """The expected rate of each of an engine's texts. An interrupted measurement is not started again."""

    def __init__(self, engine: "Engine") -> None:
        self._engine, self._is_known = engine, False
        self._rate: Rate | None = None

    def of(self, result: "GenerationResult") -> float | None:
        """Tokens per second; None if unknown. The first call may measure this machine."""
        if not self._is_known:
            self._is_known = True
            with stage_progress() as progress:
                self._rate = expected_rate(self._engine, progress)
        return None if self._rate is None else self._rate(result.n_prompt_tokens, result.n_generated_tokens)


def expected_rate(engine: "Engine", progress: Progress) -> Rate | None:
    """What the plan, or else the CPU alone, should reach; None for fp32 weights.

    Measures this machine for a few seconds if it was never measured for such a model.
    """
    from hetero_ee.weights.model_weights import UNQUANTIZED

    if engine.quantizer == UNQUANTIZED:
        return None
    return _rate_without_plan(engine, progress) if engine.plan is None else lambda *counts: _planned(engine, *counts)


def _planned(engine: "Engine", n_prompt: int, n_new: int) -> float | None:
    """None if nothing is known of how good the drafts are, or the context has grown on the way."""
    from hetero_ee.planning.times.prediction import predicted_text_s

    made, placement = engine.plan, engine.placement
    if made is None or placement is None or placement.profile is None:
        return None
    growth = engine.executor.growth  # which reads the text again
    if growth is not None and any(n_prompt <= size <= n_prompt + n_new for size in growth.outgrown):
        return None
    seconds = predicted_text_s(engine.spec, placement.profile, made, placement.statistics, n_new, n_prompt)
    return None if seconds is None else n_new / seconds


def _rate_without_plan(engine: "Engine", progress: Progress) -> Rate:
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.planner import plan
    from hetero_ee.planning.times.prediction import predicted_run_s
    from hetero_ee_cli.commands.profile import profile_for

    profile = profile_for(engine.spec, None, progress, threads=(engine.threads,))

    def rate(n_prompt: int, n_new: int) -> float | None:
        # The cache grows as it is needed.
        limits = Limits(context_tokens=n_prompt + n_new, threads=engine.threads, gpu_layers=0, mode="full")
        try:
            made = plan(engine.spec, profile, limits, predict_at_tokens=n_prompt + max(1, n_new // 2))
        except UsageError:  # what runs may still be more than the planner would risk
            return None
        return n_new / predicted_run_s(engine.spec, profile, made, 0, n_new, n_prompt)

    return rate


def slowness(result: "GenerationResult", expected: float | None, uses_gpu: bool) -> list[str]:
    """A sentence for a text that took more than twice the expected time, none for others."""
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
