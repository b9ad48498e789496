"""What a text's speed is expected to be, from this machine's profile: printed beside what it was."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_ee.engine import Engine

Progress = Callable[[str, int, int], None]


def expected_rate(engine: "Engine", progress: Progress) -> Callable[[int, int], float | None] | None:
    """(prompt tokens, new tokens) -> tokens per second that the model alone should make; None for fp32 weights.

    Measures this machine for a few seconds where it was never measured for such a model.
    """
    from hetero_ee.errors import UsageError
    from hetero_ee.planning.limits import Limits
    from hetero_ee.planning.planner import plan
    from hetero_ee.planning.prediction import predicted_run_s
    from hetero_ee.weights.model_weights import UNQUANTIZED
    from hetero_ee_cli.profile import profile_for

    if engine.quantizer == UNQUANTIZED:
        return None
    profile = profile_for(engine.spec, None, progress, threads=(engine.threads,))

    def rate(n_prompt: int, n_new: int) -> float | None:
        # Nothing runs on a GPU yet, and the cache grows as it is needed.
        limits = Limits(context_tokens=n_prompt + n_new, threads=engine.threads, gpu_layers=0)
        try:
            made = plan(engine.spec, profile, limits, predict_at_tokens=n_prompt + max(1, n_new // 2))
        except UsageError:  # what runs may still be more than the planner would dare
            return None
        return n_new / predicted_run_s(engine.spec, profile, made, 0, n_new, n_prompt)

    return rate
