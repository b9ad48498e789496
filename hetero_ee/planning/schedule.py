"""How to decode in given places: every token through all layers, or drafts that exit at the best of all boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_ee.errors import UsageError
from hetero_ee.planning.costs import ON_GPU
from hetero_ee.planning.limits import MAX_DRAFT_TOKENS
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.rounds import Round, expected_round

WORTH_IT = 0.97  # exact mode must promise less than this share of full mode's time: predictions err by a few percent
BEST_OF_DRAFTS = 8  # longer drafts are tried only where the user asks for them


@dataclass(frozen=True, slots=True)
class Schedule:
    """mode "full" or "exact". boundary: layers before the exit, None in full mode. draft_tokens: rows of one pass."""

    mode: str
    boundary: int | None
    draft_tokens: int
    round: Round


@dataclass(frozen=True, slots=True)
class _Chain:
    """Seconds before each part of the chain for m rows, crossings included: sums[m][i] is what parts 0..i-1 take."""

    sums: dict[int, Any]
    exit_head_s: Any

    def draft_s(self, n_parts: int) -> float:
        """One row through the first parts and the exit head."""
        return float(self.sums[1][n_parts] + self.exit_head_s[n_parts])

    def verify_s(self, n_parts: int, m: int) -> float:
        """m rows through the parts behind, head and the way back included."""
        return float(self.sums[m][-1] - self.sums[m][n_parts])


def best_schedule(problem: Problem, places: Sequence[str], context_tokens: int) -> Schedule:
    """The schedule of least expected time per token; full mode unless exact mode is worth it, or as the user says."""
    full = full_schedule(problem, places, context_tokens)
    wanted = problem.limits.mode
    if wanted == "full" or problem.statistics is None:
        return full
    exact = best_exact(problem, places, context_tokens)
    if exact is None and wanted == "exact":
        raise UsageError("nothing exits at any boundary of this model; drop --mode exact.")
    if exact is None:
        return full
    pays = exact.round.seconds_per_token < WORTH_IT * full.round.seconds_per_token
    return exact if pays or wanted == "exact" else full


def full_schedule(problem: Problem, places: Sequence[str], context_tokens: int) -> Schedule:
    """Every token through every layer."""
    seconds = problem.costs.pass_time(problem.parts, places, 1, context_tokens).seconds
    return Schedule("full", None, 1, Round(seconds, 1.0, 1.0))


def best_exact(problem: Problem, places: Sequence[str], context_tokens: int) -> Schedule | None:
    """Exact mode at the boundary and draft length of least expected time; every boundary is evaluated."""
    exact = exact_schedules(problem, places, context_tokens)
    return min(exact, key=lambda schedule: schedule.round.seconds_per_token, default=None)


def exact_schedules(problem: Problem, places: Sequence[str], context_tokens: int) -> list[Schedule]:
    """For each boundary with exits the best draft length."""
    statistics, asked = problem.statistics, problem.limits.draft_tokens
    if statistics is None:
        return []
    lengths = [asked] if asked else list(range(2, BEST_OF_DRAFTS + 1))
    chain = _chain(problem, places, context_tokens, max(lengths))
    found = []
    for boundary in range(1, problem.spec.n_layers):
        rates = statistics.rates_at(boundary)
        if rates.exit_rate == 0:
            continue
        n_parts = 1 + 2 * boundary
        rounds = [
            (expected_round(rates, n, chain.draft_s(n_parts), lambda m, k=n_parts: chain.verify_s(k, m)), n)  # type: ignore[misc]
            for n in lengths
        ]
        best, length = min(rounds, key=lambda pair: pair[0].seconds_per_token)
        found.append(Schedule("exact", boundary, length, best))
    return found


def _chain(problem: Problem, places: Sequence[str], context_tokens: int, max_rows: int) -> _Chain:
    assert max_rows <= MAX_DRAFT_TOKENS
    costs, parts = problem.costs, problem.parts
    on_gpu = np.array([False, *(place in ON_GPU for place in places), False])
    crosses = np.diff(on_gpu.astype(np.int8)) != 0  # before each part, and after the last
    sums = {}
    for m in range(1, max_rows + 1):
        seconds = []
        for part, place in zip(parts, places, strict=True):
            copy_s = costs.copy_s(part) if place == "stream" else 0.0
            seconds.append(max(costs.part_s(part, place, m, context_tokens), copy_s))
        steps = np.array([*seconds, 0.0]) + crosses * costs.crossing_s(m)
        sums[m] = np.concatenate([[0.0], np.cumsum(steps)])
    head_s = costs.part_s(problem.head, places[-1], 1, context_tokens)
    head_on_gpu = places[-1] in ON_GPU
    # From the boundary's device to the head's, and the drafted token from there to the CPU, which looks it up.
    ways = (on_gpu[: len(parts) + 1] != head_on_gpu).astype(np.int8) + int(head_on_gpu)
    return _Chain(sums, head_s + ways * costs.crossing_s(1))
