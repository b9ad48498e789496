"""Compares the speed of a finished text with the plan's prediction, and drops a provisional profile that it refutes."""

from typing import Protocol

from hetero_ee.config import data_folder
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.planning.times.prediction import predicted_text_s
from hetero_ee.profiling.kept import forget_provisional
from hetero_ee.runtime.executors.executor import Executor

FAST = 1.5  # times the expected speed; a faster text means that other programs disturbed the profile's measurement
MIN_S, MIN_TOKENS = 1.0, 8  # least length of a text whose speed is judged


class RunningModel(Protocol):
    """The part of an Engine that predictions are made from."""

    spec: ModelSpec

    @property
    def plan(self) -> Plan | None: ...

    @property
    def plan_request(self) -> PlanRequest | None: ...

    @property
    def executor(self) -> Executor: ...


def expected_tokens_per_s(model: RunningModel, n_prompt: int, n_new: int) -> float | None:
    """Return the tokens per second that the plan predicts for a text of n_new tokens.

    None without a plan or a profile, if the acceptance of drafts is unknown, or if the context has grown during the
    text, since the text is then read again.
    """
    made, request, growth = model.plan, model.plan_request, model.executor.growth
    if made is None or request is None or request.profile is None:
        return None
    if growth is not None and any(n_prompt <= size <= n_prompt + n_new for size in growth.outgrown):
        return None
    seconds = predicted_text_s(model.spec, request.profile, made, request.statistics, n_new, n_prompt)
    return None if seconds is None else n_new / seconds


def dropped_profile(model: RunningModel, n_prompt: int, n_new: int, seconds: float) -> str:
    """Remove a provisional profile from the disk if a text in full mode was much faster than it predicts.

    Args:
        seconds: from the text's first token to its last.

    Returns:
        A sentence that reports the removal; "" if nothing was removed.
    """
    made, request = model.plan, model.plan_request
    profile = None if request is None else request.profile
    if profile is None or not profile.doubts or made is None or made.mode != "full":
        return ""
    if seconds < MIN_S or n_new < MIN_TOKENS:
        return ""
    rate, expected = (n_new - 1) / seconds, expected_tokens_per_s(model, n_prompt, n_new)
    if expected is None or rate < FAST * expected or not forget_provisional(data_folder(), profile, model.spec):
        return ""
    return (
        f"This text ran at {rate:.1f} tokens/s, {rate / expected:.1f} times the expected speed, because the profile of "
        "this machine was measured while other programs ran. It is dropped: the next start measures again."
    )
