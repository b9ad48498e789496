"""Makes plans with one option changed, to show what each option gains and how the speed depends on VRAM."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetero_ee.errors import UsageError
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.candidates import bytes_for_all
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.reports.pins import gib
from hetero_ee.planning.statistics import Statistics
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.units import GIB

MIN_CONTEXT_TOKENS = 512  # the shortest context that is suggested
N_CURVE_STEPS = 16


@dataclass(frozen=True, slots=True)
class Request:
    """A plan and the inputs that it was made from."""

    spec: ModelSpec
    profile: HardwareProfile
    limits: Limits
    statistics: Statistics
    made: Plan

    def plan_with(self, **changes: object) -> Plan:
        """Return a plan with these fields of Limits changed. The card is assumed to have the requested VRAM.

        Rates are predicted for the original plan's context length, or for a new shorter one.

        Raises:
            UsageError: if no such plan is possible.
        """
        limits: Limits = replace(self.limits, **{"context_tokens": self.made.context_tokens} | changes)  # type: ignore[arg-type]
        profile, budget = self.profile, limits.vram_budget_bytes
        if profile.gpu is not None and budget is not None:
            profile = replace(profile, gpu=replace(profile.gpu, free_bytes=max(profile.gpu.free_bytes, budget)))
        context = min(self.made.prediction.context_tokens, limits.context_tokens)
        return plan(self.spec, profile, limits, self.statistics, predict_at_tokens=context)


def what_if(request: Request) -> dict[str, Plan]:
    """Return alternative plans by the option that would request them, leaving out impossible ones."""
    found = {}
    for words, limits in _changes(request):
        try:
            found[words] = request.plan_with(**limits)
        except UsageError:  # pinned parts no longer fit, or the RAM is too small
            continue
    return found


def _changes(request: Request) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield changes of one option: its text on the command line, and the fields of Limits that it changes."""
    made, known, gpu = request.made, request.statistics, request.profile.gpu
    for kv_type in KV_BYTES:
        if kv_type != made.kv_type:
            yield f"--kv-type {kv_type}", {"kv_type": kv_type}
    for times in request.profile.cpu:
        if times.threads != made.threads:
            yield f"-t {times.threads}", {"threads": times.threads}
    half, own = made.context_tokens // 2, request.spec.max_context_tokens
    if half >= MIN_CONTEXT_TOKENS:
        yield f"-c {half}", {"context_tokens": half}
    if own > made.context_tokens:
        yield f"-c {own}", {"context_tokens": own}
    for extra_bytes in (GIB, -GIB):
        budget = made.vram_budget_bytes + extra_bytes
        if gpu is not None and made.vram_budget_bytes and budget > 0:
            larger = "" if budget <= gpu.free_bytes else " (more than is free)"
            yield f"--vram-budget {gib(budget)}{larger}", {"vram_budget_bytes": budget}
    if known.exits is not None or known.drafts is not None:
        other = "exact" if made.mode == "full" else "full"
        yield f"--mode {other}", {"mode": other, "risk": None}


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Expected speed with one VRAM budget."""

    vram_budget_bytes: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Expected speeds with VRAM budgets from none to all that is free on the card."""

    points: tuple[CurvePoint, ...]
    used_bytes: int  # the budget of the original plan, which is one of the points
    all_bytes: int  # needed for every layer on the GPU; one of the points if the card has as much


def vram_curve(request: Request) -> Curve:
    """Return the expected speeds along the VRAM budget.

    Raises:
        UsageError: if there is no GPU, or if no budget is enough.
    """
    spec, profile, made = request.spec, request.profile, request.made
    if profile.gpu is None:
        raise UsageError(f"{profile.name} has no GPU, so there is no curve; choose another machine with --hardware.")
    limits = replace(request.limits, context_tokens=made.context_tokens)
    card_bytes, all_bytes = profile.gpu.free_bytes, bytes_for_all(resolve(spec, profile, limits, request.statistics))
    budgets = {card_bytes * step // N_CURVE_STEPS for step in range(N_CURVE_STEPS + 1)} | {made.vram_budget_bytes}
    points, refusal = [], None
    for budget in sorted(budgets | ({all_bytes} if all_bytes <= card_bytes else set())):
        try:
            rate = request.plan_with(vram_budget_bytes=budget).prediction.generated_tokens_per_s
        except UsageError as error:  # pins that need more
            refusal = error
        else:
            points.append(CurvePoint(budget, rate))
    if refusal is not None and not points:
        raise refusal
    return Curve(tuple(points), made.vram_budget_bytes, all_bytes)
