"""How to decode in given places: every token through all layers, drafts that exit at the best of all exit layers, or
chains of drafts from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from hetero_ee.errors import UsageError
from hetero_ee.planning.limits import MAX_DRAFT_LENGTH
from hetero_ee.planning.plan import CHAIN, EXIT
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.times.costs import ON_GPU, SPLIT, STREAMED
from hetero_ee.planning.times.lanes import pass_time
from hetero_ee.planning.times.overlap import Overlap, overlap
from hetero_ee.planning.times.rounds import LevelWalk, Round, WalkCosts, chain_round, expected_rounds, walk_rounds
from hetero_ee.planning.times.streamed_rounds import StreamedRounds

WORTH_IT = 0.97  # exact mode must promise less than this share of full mode's time: predictions err by a few percent
BEST_OF_DRAFTS = 8  # longer drafts are tried only where the user asks for them


@dataclass(frozen=True, slots=True)
class Schedule:
    """mode "full" or "exact". drafts: EXIT, CHAIN (of another source), None in full mode. exit_layer: layers before the
    exit, 0 where drafts come in a chain, None in full mode. draft_length: rows of one pass. exit_levels: exit layers
    before it at which rows are judged too."""

    mode: str
    drafts: str | None
    exit_layer: int | None
    draft_length: int
    round: Round
    exit_levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Seconds before each part of the chain for m rows, transfers included: sums[m][i] is what parts 0..i-1 take.

    exit_head_s[i], sliced_head_s[i]: the head for one row behind so many parts, and its rows of a few candidates alone.
    streamed: says it better where weights are streamed. overlap: what the GPU can do meanwhile. host_s[i]: one row
    through those parts from the i-th on that the CPU computes.
    """

    sums: dict[int, list[float]]
    exit_head_s: list[float]
    sliced_head_s: list[float]
    has_streams: bool = False
    streamed: StreamedRounds | None = None
    overlap: Overlap | None = None
    host_s: Sequence[float] = ()

    def draft_s(self, n_parts: int) -> float:
        """One row through the first parts and the exit head."""
        if self.streamed is not None:
            return self.streamed.draft_s(n_parts)
        return self.sums[1][n_parts] + self.exit_head_s[n_parts]

    def verify_s(self, n_parts: int, m: int) -> float:
        """m rows through the parts behind, head and the way back included."""
        if self.streamed is not None:
            return self.streamed.verify_s(n_parts, m)
        sums = self.sums[m]
        return sums[-1] - sums[n_parts]

    def layers_ahead(self, exit_layer: int) -> int:
        """How many layers the GPU computes for one row while the CPU verifies those before: what took longer would be
        waited for, whether the row is right or not."""
        if self.overlap is None or self.has_streams:
            return 0
        batch_s = self.host_s[1 + 2 * self.overlap.layers_behind(exit_layer)]
        ends = range(1, self.overlap.layers_ahead(exit_layer) + 1)
        return sum(self.sums[1][1 + 2 * n_layers] <= batch_s for n_layers in ends)

    def ahead_s(self, exit_layer: int) -> float:
        """One row through these layers, 0 for none."""
        n_layers = self.layers_ahead(exit_layer)
        return self.sums[1][1 + 2 * n_layers] if n_layers else 0.0

    def walk_ahead_s(self, walk: LevelWalk) -> float:
        """The same of a row that would have exited on its way, as often as rows do."""
        ahead_s = self.ahead_s(walk.places[-1])
        spared_s = (min(ahead_s, self.sums[1][1 + 2 * place]) for place in walk.places)
        exited_s = sum(share * seconds for share, seconds in zip(walk.exit_shares, spared_s, strict=True))
        return exited_s + (1 - walk.rates.exit_rate) * ahead_s

    def walk_costs(self, walk: LevelWalk) -> WalkCosts:
        """A row that waits passes its other layers together with one that comes by, at what one row more takes."""
        ends, p = [1 + 2 * place for place in walk.places], walk.rates.exit_rate
        shares = [share / p if p else 0.0 for share in walk.exit_shares]  # of rows that exit
        judged_s = list(accumulate(self._judging_s(ends)))
        exits_s = (self.sums[1][end] + seconds for end, seconds in zip(ends, judged_s, strict=True))
        exit_s = sum(share * seconds for share, seconds in zip(shares, exits_s, strict=True))
        waiting = list(accumulate(shares))  # behind each place

        def last_s(m: int) -> float:
            more_s = [self.sums[m][end] - self.sums[1][end] for end in ends]
            taken_s = (
                share * (after - before) for share, (before, after) in zip(waiting, pairwise(more_s), strict=False)
            )
            return self.sums[1][ends[-1]] + sum(taken_s)

        return WalkCosts(exit_s, last_s, judged_s[-1], self.exit_head_s[ends[-1]])

    def _judging_s(self, places: Sequence[int]) -> list[float]:
        """Of one row at each: by the whole head first and last, by the head's rows of its candidates between."""
        first, *between, last = places
        return [self.exit_head_s[first], *(self.sliced_head_s[place] for place in between), self.exit_head_s[last]]


def best_schedule(problem: Problem, places: Sequence[str], context_tokens: int) -> Schedule:
    """The schedule of least expected time per token; full mode unless exact mode is worth it, or as the user says."""
    full = full_schedule(problem, places, context_tokens)
    wanted = problem.limits.mode
    if wanted == "full" or SPLIT in places:
        return full
    exact = best_exact(problem, places, context_tokens)
    if exact is None and wanted == "exact":
        raise UsageError("nothing exits at any exit layer of this model; drop --mode exact.")
    if exact is None:
        return full
    pays = exact.round.seconds_per_token < WORTH_IT * full.round.seconds_per_token
    return exact if pays or wanted == "exact" else full


def full_schedule(problem: Problem, places: Sequence[str], context_tokens: int) -> Schedule:
    """Every token through every layer."""
    seconds = pass_time(problem.costs, problem.parts, places, 1, context_tokens).seconds
    return Schedule("full", None, None, 1, Round(seconds, 1.0, 1.0))


def best_exact(problem: Problem, places: Sequence[str], context_tokens: int) -> Schedule | None:
    """Exact mode of least expected time, of all exit layers, chains and draft lengths; None without drafts.

    Where weights are streamed, the exit layer is chosen as if each part took the longer of copy and computing.
    """
    if problem.statistics.exits is None and problem.statistics.drafts is None:
        return None
    lengths = _lengths(problem)
    chain = chain_of(problem, places, context_tokens, max(lengths))
    rough = replace(chain, streamed=None)
    exact = [*_exits(problem, rough, lengths), *_chains(problem, rough, lengths)]
    best = min(exact, key=_seconds_per_token, default=None)
    if best is None or best.exit_layer is None or chain.streamed is None:
        return best
    if best.drafts == CHAIN:
        return min(_chains(problem, chain, lengths), key=_seconds_per_token)
    return _exit_at(problem, best.exit_layer, chain, lengths)


def exit_schedules(problem: Problem, places: Sequence[str], context_tokens: int) -> list[Schedule]:
    """For each exit layer with exits the best draft length."""
    lengths = _lengths(problem)
    return _exits(problem, chain_of(problem, places, context_tokens, max(lengths)), lengths)


def _lengths(problem: Problem) -> list[int]:
    asked = problem.limits.draft_length
    return [asked] if asked else list(range(2, BEST_OF_DRAFTS + 1))


def _exits(problem: Problem, chain: Chain, lengths: Sequence[int]) -> list[Schedule]:
    statistics = problem.statistics.exits
    if statistics is None:
        return []
    found = []
    for exit_layer in range(1, problem.spec.n_layers):
        walk = statistics.walk_at(exit_layer)
        if statistics.rates_at(exit_layer).exit_rate > 0 or (walk is not None and walk.exit_rate > 0):
            found.append(_exit_at(problem, exit_layer, chain, lengths))
    return found


def _exit_at(problem: Problem, exit_layer: int, chain: Chain, lengths: Sequence[int]) -> Schedule:
    """With the best draft length; with levels on the way where that is known to be faster."""
    assert problem.statistics.exits is not None
    exits, n_parts, most = problem.statistics.exits, 1 + 2 * exit_layer, max(lengths)
    ahead_s, verify_s = chain.ahead_s(exit_layer), partial(chain.verify_s, n_parts)
    alone = expected_rounds(exits.rates_at(exit_layer), most, chain.draft_s(n_parts), verify_s, ahead_s)
    found = _of_best_length(exit_layer, alone, lengths)
    walk = exits.level_walk(exit_layer)
    if walk is None or chain.has_streams:
        return found
    rounds = walk_rounds(walk.rates, most, chain.walk_costs(walk), verify_s, chain.walk_ahead_s(walk))
    walked = _of_best_length(exit_layer, rounds, lengths, walk.levels)
    return walked if _seconds_per_token(walked) < WORTH_IT * _seconds_per_token(found) else found


def _of_best_length(
    exit_layer: int, rounds: Sequence[Round], lengths: Sequence[int], levels: tuple[int, ...] = ()
) -> Schedule:
    length = min(lengths, key=lambda n: rounds[n - 1].seconds_per_token)
    return Schedule("exact", EXIT, exit_layer, length, rounds[length - 1], levels)


def _chains(problem: Problem, chain: Chain, lengths: Sequence[int]) -> list[Schedule]:
    """For each length one: no row of a chain exits, so that its time is the same at every exit layer, and 0 stands."""
    drafts = problem.statistics.drafts
    if drafts is None:
        return []
    rounds = [chain_round(n, drafts.acceptance_at, drafts.draft_s, partial(chain.verify_s, 0)) for n in lengths]
    return [Schedule("exact", CHAIN, 0, n, found) for n, found in zip(lengths, rounds, strict=True)]


def _seconds_per_token(schedule: Schedule) -> float:
    return schedule.round.seconds_per_token


def chain_of(problem: Problem, places: Sequence[str], context_tokens: int, max_rows: int) -> Chain:
    assert max_rows <= MAX_DRAFT_LENGTH
    costs, parts = problem.costs, problem.parts
    on_gpu = np.array([False, *(place in ON_GPU for place in places), False])
    transfers = np.diff(on_gpu.astype(np.int8)) != 0  # before each part, and after the last
    keys = [(part.shape, place) for part, place in zip(parts, places, strict=True)]
    shapes = dict(zip(keys, zip(parts, places, strict=True), strict=True))
    sums = {}
    for m in range(1, max_rows + 1):
        seconds = {
            (part.shape, place): max(
                costs.part_s(part, place, m, context_tokens), costs.copy_s(part) if place == "stream" else 0.0
            )
            for part, place in shapes.values()
        }
        steps = np.array([*(seconds[key] for key in keys), 0.0]) + transfers * costs.transfer_s(m)
        steps[-1] = costs.logits_transfer_s(m) if on_gpu[-2] else 0.0
        sums[m] = [0.0, *np.cumsum(steps).tolist()]
    head_s = costs.part_s(problem.head, places[-1], 1, context_tokens)
    head_on_gpu = places[-1] in ON_GPU
    # From the exit layer's device to the head's, and the drafted token from there to the CPU, which looks it up.
    ways = (on_gpu[: len(parts) + 1] != head_on_gpu).astype(np.int8) + int(head_on_gpu)
    streams = any(place in STREAMED for place in places)
    streamed = StreamedRounds(costs, parts, places, context_tokens, max_rows) if streams else None
    ways_s = ways * costs.transfer_s(1)
    alone_s = [
        0.0 if place in ON_GPU else costs.part_s(part, place, 1, context_tokens)
        for part, place in zip(parts, places, strict=True)
    ]
    host_s = np.cumsum(alone_s[::-1])[::-1].tolist()
    exit_head_s = (head_s + ways_s).tolist()
    return Chain(sums, exit_head_s, ways_s.tolist(), streams, streamed, overlap(places), host_s)
