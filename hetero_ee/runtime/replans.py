"""Replaces a running plan: by a smaller one if memory runs out, or by one for a longer context."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.context import grown
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.prediction import predicted_text_s
from hetero_ee_profiles.hardware import HardwareProfile

SAME_SPEED = 0.01  # smaller changes of the rate are not reported


@dataclass(frozen=True, slots=True)
class Replans:
    """Makes further plans for the same model and machine, with the mode and exit layers of the first one."""

    spec: ModelSpec
    profile: HardwareProfile
    limits: Limits
    statistics: Statistics
    first: Plan
    grows: bool  # false for a plan from a file, and if the caller chose the context length

    @classmethod
    def of(cls, spec: ModelSpec, request: PlanRequest, limits: Limits, first: Plan) -> Self | None:
        """Return the replans of a request, or None if it has no profile to plan with."""
        if request.profile is None:
            return None
        depths = request.statistics.depths_of(first)
        statistics = replace(request.statistics, depths=() if depths is None else (depths,))
        grows = request.plan is None and not limits.context_tokens
        same = replace(limits, kv_type=first.kv_type, threads=first.threads, mode=first.mode, risk=first.risk)
        return cls(spec, request.profile, same, statistics, first, grows)

    def smaller(self, vram_budget_bytes: int, context_tokens: int) -> Plan:
        """Return a plan within this VRAM budget (0 for the CPU only), without the user's pins.

        Raises:
            UsageError: if nothing fits.
        """
        budget, gpu_layers = (vram_budget_bytes, None) if vram_budget_bytes else (None, 0)
        return self._planned(
            vram_budget_bytes=budget, gpu_layers=gpu_layers, overrides=(), context_tokens=context_tokens
        )

    def larger(self, running: Plan, context_tokens: int) -> Plan:
        """Return a plan for a longer context. The user's pins are dropped if memory ran out before."""
        on_gpu = running.n_bytes("gpu") > 0
        if not on_gpu or running.vram_budget_bytes != self.first.vram_budget_bytes:
            return self.smaller(running.vram_budget_bytes if on_gpu else 0, context_tokens)
        return self._planned(context_tokens=context_tokens)

    def token_s(self, made: Plan, n_depth: int) -> float | None:
        """Return a plan's expected seconds per token after n_depth tokens of context, None if unknown."""
        return predicted_text_s(self.spec, self.profile, made, self.statistics, 1, n_depth)

    def _planned(self, **changes: Any) -> Plan:
        return make_plan(self.spec, self.profile, replace(self.limits, **changes), self.statistics)


@dataclass(slots=True)
class Growth:
    """Replaces plans by ones for a longer context when a request exceeds a default context length.

    Lengths for which no plan was possible are not tried again.
    """

    replans: Replans
    warn: Callable[[str], None]  # called with a sentence about each growth
    refused_tokens: int | None = None
    outgrown: list[int] = field(default_factory=list)  # contexts that were too short

    @property
    def most_tokens(self) -> int:
        """Longest context length: the model's own."""
        return self.replans.spec.max_context_tokens

    def larger(self, plan: Plan, n_tokens: int) -> Plan | None:
        """Return a plan for at least n_tokens, or None if the present one suffices or none can be made."""
        if n_tokens <= plan.context_tokens or (self.refused_tokens is not None and n_tokens >= self.refused_tokens):
            return None
        found = grown(partial(self.replans.larger, plan), plan.context_tokens, n_tokens, self.most_tokens)
        if found is None and n_tokens <= self.most_tokens:
            self.refused_tokens = n_tokens
        return found

    def tell(self, before: Plan, after: Plan) -> None:
        """Report to the user that the plan `after` replaces `before`."""
        self.outgrown.append(before.context_tokens)
        depth = before.context_tokens
        old_s, new_s = self.replans.token_s(before, depth), self.replans.token_s(after, depth)
        speed = ""
        if old_s and new_s:
            same = abs(new_s / old_s - 1) < SAME_SPEED
            rates = f"{1 / new_s:.3g} instead of {1 / old_s:.3g} tokens/s are expected from here on"
            speed = ", and the speed stays the same" if same else f", and {rates}"
        self.warn(
            f"The context grew from {before.context_tokens:,} to {after.context_tokens:,} tokens: a text needs "
            f"them{speed}."
        )
