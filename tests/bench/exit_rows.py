"""One line of the early-exit benchmark: what was measured, and what the formula says of the same rates."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetero_ee.decoding.result import GeneratedToken
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import EXIT, SEQUENCE, Plan
from hetero_ee.planning.problem import Problem, resolve
from hetero_ee.planning.statistics import ExitRates, ExitStatistics, Statistics
from hetero_ee.planning.times.steps import StepTimes, exit_steps, sequence_step
from hetero_ee.speculation.statistics import DraftCounts, DraftStatistics
from hetero_ee_profiles.hardware import HardwareProfile

MEASURED, EMULATED, REPLAYED = "measured", "emulated", "timing replay, no quality claim"


@dataclass(frozen=True, slots=True)
class Row:
    """label: MEASURED, EMULATED or REPLAYED. cpu_share: of the layers. asked: what was to draft; drafts: what did, None
    in full mode. draft_length: rows of one verification at most, m.

    exit_rate, precision: p and q as counted; acceptance: of a chain's positions, as counted. r: seconds of a row behind
    the exit layer (of a chain: on the CPU) over those before; kappa: of m rows there over one's. head_s: the exit
    head or the head; draft_s: one draft, head included. speedup: of exact over full; formula: the same from p, q or
    acceptance and these seconds. ahead: share of rounds whose first row had been drafted ahead, which the formula
    takes as it is.
    """

    label: str
    model: str
    machine: str
    cpu_share: float
    asked: str
    sampling: str
    mode: str
    drafts: str | None
    exit_layer: int | None
    draft_length: int
    n_tokens: int
    exit_rate: float | None
    precision: float | None
    acceptance: tuple[float, ...]
    r: float | None
    kappa: float | None
    head_s: float
    draft_s: float | None
    rows_per_pass: float
    tokens_per_pass: float
    full_token_s: float
    exact_token_s: float
    formula: float
    ahead: float | None = None

    @property
    def speedup(self) -> float:
        return self.full_token_s / self.exact_token_s

    @property
    def share_of_formula(self) -> float:
        return self.speedup / self.formula


@dataclass(frozen=True, slots=True)
class Timed:
    """Texts as they came. seconds: after each text's first token, n_tokens the tokens in them."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    n_tokens: int

    @property
    def token_s(self) -> float:
        return self.seconds / self.n_tokens


def timed(texts: Iterable[Iterable[GeneratedToken]]) -> Timed:
    """Runs them, one after the other."""
    token_ids, seconds, n_tokens = [], 0.0, 0
    for text in texts:
        tokens = list(text)
        token_ids.append(tuple(token.token_id for token in tokens))
        seconds += tokens[-1].elapsed_s - tokens[0].elapsed_s
        n_tokens += len(tokens) - 1
    return Timed(tuple(token_ids), seconds, n_tokens)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds by which a round is reckoned. full_s: a token at full depth. earlier_s: one row before the exit layer,
    and head_s the head on it; verify_s(m): m rows behind it, or of a chain through all. draft_s: of one draft.

    r: see Row. ahead_s: of one row through the layers that it can pass ahead, 0 where there are none.
    """

    full_s: float
    head_s: float
    draft_s: float
    verify_s: Callable[[int], float]
    r: float | None
    ahead_s: float = 0.0


def planned_costs(
    spec: ModelSpec,
    profile: HardwareProfile,
    plan: Plan,
    context_tokens: int,
    chain_draft_s: float,
    exits: ExitStatistics | None = None,
) -> StepCosts:
    """From the profile, at this context. chain_draft_s: of one draft of a chain. exits: whose maps are charged."""
    limits = Limits(context_tokens=plan.context_tokens, kv_type=plan.kv_type, threads=plan.threads)
    problem = resolve(spec, profile, limits, Statistics())
    places = plan.decode_placements
    ranks = None if exits is None else exits.map_ranks
    times = StepTimes(problem.costs, problem.parts, places, context_tokens, plan.draft_length, map_ranks=ranks)
    full_s = times.verify_s(0, 1)
    if plan.drafts == EXIT and plan.exit_layer is not None:
        exit_layer = plan.exit_layer
        r = times.verify_s(exit_layer, 1) / times.layers_s(exit_layer)
        head_s, ahead_s = times.exit_head_s(exit_layer), times.ahead_s(exit_layer)
        verify_s = partial(times.verify_s, exit_layer)
        return StepCosts(full_s, head_s, times.draft_s(exit_layer), verify_s, r, ahead_s)
    gpu_s = _gpu_s(problem, places, context_tokens)
    head_s = problem.costs.part_s(problem.head, places[-1], 1, context_tokens)
    r = (full_s - gpu_s) / gpu_s if gpu_s else None
    return StepCosts(full_s, head_s, chain_draft_s, partial(times.verify_s, 0), r)


def _gpu_s(problem: Problem, places: Sequence[str], context_tokens: int) -> float:
    """One row through the layers on the GPU."""
    on_gpu = [(part, place) for part, place in zip(problem.parts, places, strict=True) if place == "gpu"]
    layers = [(part, place) for part, place in on_gpu if part.layer is not None]
    return sum(problem.costs.part_s(part, place, 1, context_tokens) for part, place in layers)


class StepCounts(DraftCounts):
    """checked_runs[n]: steps with n drafts that the full model judged."""

    def __init__(self) -> None:
        super().__init__()
        self.checked_runs = Counter[int]()

    def add_step(self, origins: Sequence[str], n_accepted: int, n_tokens: int) -> None:
        """See DraftCounts.add_step."""
        super().add_step(origins, n_accepted, n_tokens)
        self.checked_runs[min(n_tokens, len(origins))] += 1

    @property
    def acceptance(self) -> tuple[float, ...]:
        """For each position of a draft sequence the share of judged drafts there that were right."""
        accepted = self.statistics(0, 0).accepted_runs
        checked = [self.checked_runs[n] for n in range(max(self.checked_runs, default=0) + 1)]
        return tuple(sum(accepted[j:]) / sum(checked[j:]) for j in range(1, len(checked)))


def row(described: Row, counts: StepCounts, costs: StepCosts, full: Timed, exact: Timed) -> Row:
    """The line of a run in exact mode. described: with what is known before it."""
    assert full.token_ids == exact.token_ids, f"{described.asked}: exact mode says something else than full mode"
    n_rows, statistics = described.draft_length, counts.statistics(0, 0)
    rates = exit_rates(statistics, n_rows) if described.drafts == EXIT else None
    acceptance = counts.acceptance if described.drafts == SEQUENCE else ()
    if rates is not None:
        expected = exit_steps(rates, n_rows, costs.draft_s, costs.verify_s)[-1]
        ahead = statistics.n_ahead_kept / statistics.n_steps
        expected = replace(expected, seconds=expected.seconds - ahead * costs.ahead_s)
    else:
        at = acceptance or (0.0,)
        expected = sequence_step(n_rows, lambda j: at[min(j, len(at) - 1)], costs.draft_s, costs.verify_s)
    return replace(
        described,
        mode="exact",
        n_tokens=exact.n_tokens,
        exit_rate=rates.exit_rate if rates else None,
        precision=rates.precision if rates else None,
        acceptance=acceptance,
        r=costs.r,
        kappa=costs.verify_s(n_rows) / costs.verify_s(1),
        head_s=costs.head_s,
        draft_s=costs.draft_s,
        rows_per_pass=statistics.n_verified / statistics.n_passes,
        tokens_per_pass=statistics.tokens_per_pass,
        full_token_s=full.token_s,
        exact_token_s=exact.token_s,
        formula=costs.full_s / expected.seconds_per_token,
        ahead=statistics.n_ahead_kept / statistics.n_steps if statistics.n_ahead else None,
    )


def described_row(label: str, model: str, machine: str, cpu_share: float, asked: str, sampling: str, plan: Plan) -> Row:
    """A line with nothing measured yet."""
    n = plan.draft_length
    return Row(
        label, model, machine, cpu_share, asked, sampling, plan.mode, plan.drafts, plan.exit_layer, n, 0, None, None,
        (), None, None, 0.0, None, 1.0, 1.0, 1.0, 1.0, 1.0,
    )  # fmt: skip


def full_row(described: Row, costs: StepCosts, full: Timed) -> Row:
    """The line of a plan that declines to draft: it is full mode."""
    return replace(
        described,
        n_tokens=full.n_tokens,
        r=costs.r,
        head_s=costs.head_s,
        full_token_s=full.token_s,
        exact_token_s=full.token_s,
    )


def exit_rates(statistics: DraftStatistics, draft_length: int) -> ExitRates:
    """Of the tokens that might exit those that did; of the exits that were judged those that were right."""
    n_exits = sum(n * steps for n, steps in enumerate(statistics.drafted_runs))
    n_closed = sum(steps for n, steps in enumerate(statistics.drafted_runs) if n < draft_length - 1)
    exits = next((counts for counts in statistics.origins if counts.origin == EXIT), None)
    return ExitRates(n_exits / max(1, n_exits + n_closed), exits.precision if exits else 0.0)
