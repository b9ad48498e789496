"""What the steps of a round take under a plan: for the gate that decides, draft by draft, whether to go on."""

from collections.abc import Callable
from dataclasses import dataclass

from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import MAX_DRAFT_TOKENS, Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.schedule import chain_of
from hetero_ee_profiles.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """draft_s: one row through the layers before the boundary, exit head included. verify_s(m): m rows, 1 to
    MAX_DRAFT_TOKENS, through the layers behind it, and the head."""

    draft_s: float
    verify_s: Callable[[int], float]


def round_costs(spec: ModelSpec, profile: HardwareProfile, plan: Plan, boundary: int) -> RoundCosts:
    """At half the plan's context. boundary: 1 to the model's layers less one."""
    limits = Limits(context_tokens=plan.context_tokens, kv_type=plan.kv_type, threads=plan.threads)
    problem = resolve(spec, profile, limits, None)
    places = [part.decode_place for part in plan.parts]
    chain = chain_of(problem, places, max(1, plan.context_tokens // 2), MAX_DRAFT_TOKENS)
    n_parts = 1 + 2 * boundary
    return RoundCosts(chain.draft_s(n_parts), lambda m: chain.verify_s(n_parts, min(m, MAX_DRAFT_TOKENS)))
