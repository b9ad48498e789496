"""What a text's speed is expected to be, from this machine's profile: printed beside what it was."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_ee.engine import Engine

Progress = Callable[[str, int, int], None]


def expected_rate(engine: "Engine", progress: Progress) -> Callable[[int, int], float] | None:
    """(prompt tokens, new tokens) -> tokens per second that the model alone should make; None for fp32 weights.

    Measures this machine for a few seconds where it was never measured for such a model.
    """
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.planner import plan
    from hetero_ee.planning.prediction import predicted_run_s
    from hetero_ee.weights.model_weights import UNQUANTIZED
    from hetero_ee_cli.profile import profile_for

    if engine.quantizer == UNQUANTIZED:
        return None
    profile = profile_for(engine.spec, None, progress, threads=(engine.threads,))
    limits = Limits(context_tokens=engine.context_tokens, threads=engine.threads)

    def rate(n_prompt: int, n_new: int) -> float:
        made = plan(engine.spec, profile, limits, predict_at_tokens=n_prompt + max(1, n_new // 2))
        return n_new / predicted_run_s(engine.spec, profile, made, 0, n_new, n_prompt)

    return rate
