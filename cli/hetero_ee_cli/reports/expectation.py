"""What a text's speed is expected to be, from this machine's profile: printed beside what it was."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hetero_ee_cli.terminal.progress import stage_progress

if TYPE_CHECKING:
    from hetero_ee.decoding.result import GenerationResult
    from hetero_ee.engine import Engine

Progress = Callable[[str, int, int], None]

SLOW = 0.5  # of what is expected: nobody's predictions err by so much
MIN_S, MIN_TOKENS = 1.0, 8  # of a text that says something of the speed


class Expectation:
    """The rate of each of an engine's texts, see expected_rate, which is asked once: where the first text is through.

    A measurement that is broken off is not begun again.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine, self._is_known = engine, False
        self._rate: Callable[[int, int], float | None] | None = None

    def of(self, result: "GenerationResult") -> float | None:
        """Tokens per second; None where nothing tells."""
        if not self._is_known:
            self._is_known = True
            with stage_progress() as progress:
                self._rate = expected_rate(self._engine, progress)
        return None if self._rate is None else self._rate(result.n_prompt_tokens, result.n_generated_tokens)


def expected_rate(engine: "Engine", progress: Progress) -> Callable[[int, int], float | None] | None:
    """(prompt tokens, new tokens) -> tokens per second that the plan, or else the CPU alone, should make of a text.

    None for fp32 weights. Measures this machine for a few seconds where it was never measured for such a model.
    """
    from hetero_ee.weights.model_weights import UNQUANTIZED

    if engine.quantizer == UNQUANTIZED:
        return None
    if engine.plan is not None:
        return lambda n_prompt, n_new: planned_rate(engine, n_prompt, n_new)
    return _rate_without_plan(engine, progress)


def planned_rate(engine: "Engine", n_depth: int, n_new: int) -> float | None:
    """Tokens per second that the engine's plan should make behind n_depth others; None where nothing tells."""
    from hetero_ee.planning.times.prediction import predicted_text_s

    made, asked = engine.plan, engine.placement
    if made is None or asked is None or asked.profile is None:
        return None
    seconds = predicted_text_s(engine.spec, asked.profile, made, asked.statistics, n_new, n_depth)
    return None if seconds is None else n_new / seconds


def _rate_without_plan(engine: "Engine", progress: Progress) -> Callable[[int, int], float | None]:
    from hetero_ee.errors import UsageError
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
        except UsageError:  # what runs may still be more than the planner would dare
            return None
        return n_new / predicted_run_s(engine.spec, profile, made, 0, n_new, n_prompt)

    return rate


def slowness(result: "GenerationResult", expected: float | None, uses_gpu: bool) -> str | None:
    """A sentence for a text that took more than twice the time it should have, None for others."""
    rate = result.generated_tokens_per_s
    if expected is None or result.generation_s < MIN_S or result.n_generated_tokens < MIN_TOKENS:
        return None
    if rate >= SLOW * expected:
        return None
    spilled = ", or the GPU's driver has moved some of its memory to the system's" if uses_gpu else ""
    remedy = "lower --vram-budget" if uses_gpu else "end it"
    return (
        f"This text came at {rate:.1f} tokens/s, less than half of the {expected:.1f} expected: another program may be "
        f"busy{spilled}; {remedy}, or measure again with hetero-ee profile --refresh."
    )
