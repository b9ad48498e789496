"""Replans: how a running plan is made again, smaller after memory ran out, or larger for a longer context."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan as make_plan
from hetero_ee.planning.request import PlanRequest
from hetero_ee.planning.statistics import Statistics
from hetero_ee.planning.times.prediction import predicted_text_s
from hetero_ee.runtime.growth import Growth
from hetero_ee_profiles.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class Replans:
    """Makes a plan again for the same model and machine, in the mode and with the exits of the first one."""

    spec: ModelSpec
    profile: HardwareProfile
    limits: Limits
    statistics: Statistics
    first: Plan
    grows: bool  # false for a plan from a file, and if the caller chose the context length

    @classmethod
    def of(cls, spec: ModelSpec, request: PlanRequest, limits: Limits, first: Plan) -> Self | None:
        """Return None if there is no profile to plan by."""
        if request.profile is None:
            return None
        depths = request.statistics.depths_of(first)
        statistics = replace(request.statistics, depths=() if depths is None else (depths,))
        grows = request.plan is None and not limits.context_tokens
        same = replace(limits, kv_type=first.kv_type, threads=first.threads, mode=first.mode, risk=first.risk)
        return cls(spec, request.profile, same, statistics, first, grows)

    def smaller(self, vram_budget_bytes: int, context_tokens: int) -> Plan:
        """Return a plan within this budget of GPU memory, without the user's pins; 0 is for the CPU only.

        Raises:
            UsageError: if nothing fits.
        """
        budget, gpu_layers = (vram_budget_bytes, None) if vram_budget_bytes else (None, 0)
        return self._planned(
            vram_budget_bytes=budget, gpu_layers=gpu_layers, overrides=(), context_tokens=context_tokens
        )

    def growth(self, warn: Callable[[str], None]) -> Growth | None:
        """Return how the context grows, None if it may not."""
        if not self.grows:
            return None
        return Growth(self._larger, self._token_s, self.spec.max_context_tokens, warn)

    def _larger(self, running: Plan, context_tokens: int) -> Plan:
        """Return a plan for a longer context; without the user's pins if memory ran out before."""
        on_gpu = running.n_bytes("gpu") > 0
        if not on_gpu or running.vram_budget_bytes != self.first.vram_budget_bytes:
            return self.smaller(running.vram_budget_bytes if on_gpu else 0, context_tokens)
        return self._planned(context_tokens=context_tokens)

    def _token_s(self, made: Plan, n_depth: int) -> float | None:
        return predicted_text_s(self.spec, self.profile, made, self.statistics, 1, n_depth)

    def _planned(self, **changes: Any) -> Plan:
        return make_plan(self.spec, self.profile, replace(self.limits, **changes), self.statistics)
