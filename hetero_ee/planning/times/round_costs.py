"""What rounds take under a plan: for the gate that decides, draft by draft, whether to go on, and to predict a text."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import MAX_DRAFT_LENGTH, Limits
from hetero_ee.planning.plan import CHAIN, EXIT, Plan
from hetero_ee.planning.problem import resolve
from hetero_ee.planning.schedule import Chain, chain_of
from hetero_ee.planning.statistics import ExitStatistics, Statistics
from hetero_ee.planning.times.prediction import predicted_run_s
from hetero_ee.planning.times.rounds import LevelWalk, Round, chain_round, expected_rounds, walk_rounds
from hetero_ee_profiles.hardware import HardwareProfile


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """draft_s: one row through the layers before the exit layer, or to where it exits, judged there. verify_s(m): m
    rows, 1 to MAX_DRAFT_LENGTH, through the layers behind the exit layer, and the head. layers_ahead: of the GPU's,
    that one row gets through while the CPU verifies."""

    draft_s: float
    verify_s: Callable[[int], float]
    layers_ahead: int = 0


def round_costs(
    spec: ModelSpec, profile: HardwareProfile, plan: Plan, exit_layer: int, walk: LevelWalk | None = None
) -> RoundCosts:
    """At half the plan's context. exit_layer: 1 to the model's layers less one. walk: rates at the plan's levels."""
    chain = _chain(spec, profile, plan, max(1, plan.context_tokens // 2))
    n_parts, draft_s = 1 + 2 * exit_layer, chain.draft_s(1 + 2 * exit_layer)
    if walk is not None and plan.exit_levels == walk.levels:
        draft_s = chain.walk_costs(walk).exit_s
    verify_s = partial(_verify_s, chain, n_parts)
    return RoundCosts(draft_s, verify_s, chain.layers_ahead(exit_layer))


def pass_costs(spec: ModelSpec, profile: HardwareProfile, plan: Plan) -> Callable[[int], float]:
    """Seconds of m rows, 1 to MAX_DRAFT_LENGTH, through all layers and the head, at half the plan's context."""
    return partial(_verify_s, _chain(spec, profile, plan, max(1, plan.context_tokens // 2)), 0)


def predicted_round(
    spec: ModelSpec, profile: HardwareProfile, plan: Plan, statistics: Statistics, context_tokens: int
) -> Round | None:
    """The average round of a plan in exact mode behind so many tokens; None where nothing is known of its drafts."""
    chain = _chain(spec, profile, plan, context_tokens)
    n_rows, drafts = plan.draft_length, statistics.drafts
    if plan.drafts == EXIT and plan.exit_layer is not None and statistics.exits is not None:
        return _exits(chain, plan, plan.exit_layer, statistics.exits)
    if plan.drafts == CHAIN and drafts is not None:
        return chain_round(n_rows, drafts.acceptance_at, drafts.draft_s, partial(chain.verify_s, 0))
    return None


def predicted_text_s(
    spec: ModelSpec, profile: HardwareProfile, plan: Plan, statistics: Statistics, n_new: int, n_depth: int
) -> float | None:
    """Seconds of n_new tokens behind n_depth others with this plan; None where nothing is known of its drafts."""
    if plan.mode == "full":
        return predicted_run_s(spec, profile, plan, 0, n_new, n_depth)
    found = predicted_round(spec, profile, plan, statistics, n_depth + max(1, n_new // 2))
    return None if found is None else n_new * found.seconds_per_token


def _exits(chain: Chain, plan: Plan, exit_layer: int, known: ExitStatistics) -> Round:
    """With the plan's levels, where they are those that were measured."""
    n_parts, n_rows = 1 + 2 * exit_layer, plan.draft_length
    verify_s, walk = partial(chain.verify_s, n_parts), known.level_walk(exit_layer)
    if walk is not None and plan.exit_levels == walk.levels:
        costs = chain.walk_costs(walk)
        return walk_rounds(walk.rates, n_rows, costs, verify_s, chain.walk_ahead_s(walk))[-1]
    rates = known.rates_at(exit_layer)
    return expected_rounds(rates, n_rows, chain.draft_s(n_parts), verify_s, chain.ahead_s(exit_layer))[-1]


def _verify_s(chain: Chain, n_parts: int, m: int) -> float:
    return chain.verify_s(n_parts, min(m, MAX_DRAFT_LENGTH))


def _chain(spec: ModelSpec, profile: HardwareProfile, plan: Plan, context_tokens: int) -> Chain:
    limits = Limits(context_tokens=plan.context_tokens, kv_type=plan.kv_type, threads=plan.threads)
    places = [part.decode_place for part in plan.parts]
    return chain_of(resolve(spec, profile, limits, None), places, context_tokens, MAX_DRAFT_LENGTH)
