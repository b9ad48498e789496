"""Chooses how to decode with given placements.

The choices are full mode, drafts by early exit, draft sequences from another source, and early-exit modes, which emit
tokens at their exits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from hetero_ee.models.blocks import has_trees
from hetero_ee.options.engine import EARLY_EXIT_MODES, MAX_DRAFT_LENGTH
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.plan import EXIT, SEQUENCE
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.statistics import DepthStatistics, DraftRates, ExitRates
from hetero_ee.planning.times.early_exits import early_step
from hetero_ee.planning.times.lanes import pass_time
from hetero_ee.planning.times.steps import Step, StepTimes

WORTH_IT = 0.97  # exact mode must promise less than this share of full mode's time, as predictions err by a few percent
BEST_OF_DRAFTS = 8  # longer drafts and catch-ups are tried only on request
TREE_LENGTHS, TREE_WIDTH = (4, 6, 8, 12, MAX_DRAFT_LENGTH), 4  # draft trees that are tried without a request
TOKEN_S = attrgetter("token_s")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A way to decode, with the average step that it is expected to take."""

    mode: str
    drafts: str | None  # EXIT or SEQUENCE; None except in exact mode
    exit_layer: int | None  # layers before the exit, 0 for a draft sequence; None except in exact mode
    draft_length: int  # maximum tokens of a verification, or of a catch-up
    step: Step
    other_mode_s: float | None = None  # seconds of a token in the other mode, if that was considered
    exit_layers: tuple[int, ...] = ()  # of an early-exit mode, see Plan
    depths: DepthStatistics | None = None  # of an early-exit mode, that the step is derived from
    tree_width: int = 1  # most drafts after the same token; 1 for chains

    @property
    def token_s(self) -> float:
        return self.step.seconds_per_token


def is_worth_it(exact_per_s: float, full_per_s: float) -> bool:
    """Return whether exact mode is faster than full mode by more than predictions may err."""
    return WORTH_IT * exact_per_s > full_per_s


def best_schedule(problem: Problem, placements: Sequence[Placement], context_tokens: int) -> Schedule:
    """Return the schedule of the requested mode; without one, exact mode if it is worth it, else full mode."""
    full = full_schedule(problem, placements, context_tokens)
    asked = problem.limits.mode
    if asked in EARLY_EXIT_MODES:
        return replace(_best_early(problem, placements, context_tokens, full), other_mode_s=full.token_s)
    if asked == "full":
        return full
    exact = _best_exact(problem, placements, context_tokens)
    if exact is None and asked == "exact":  # n-grams draft, whose acceptance depends on the text
        length = problem.limits.draft_length or BEST_OF_DRAFTS
        return Schedule("exact", SEQUENCE, 0, length, full.step, other_mode_s=full.token_s)
    if exact is None:
        return full
    if asked == "exact" or is_worth_it(1 / exact.token_s, 1 / full.token_s):
        return replace(exact, other_mode_s=full.token_s)
    return replace(full, other_mode_s=exact.token_s)


def full_schedule(problem: Problem, placements: Sequence[Placement], context_tokens: int) -> Schedule:
    """Return the schedule in which every token passes every layer."""
    seconds = pass_time(problem.costs, problem.parts, placements, 1, context_tokens).seconds
    return Schedule("full", None, None, 1, Step(seconds, 1.0, 1.0))


def _best_early(problem: Problem, placements: Sequence[Placement], context_tokens: int, full: Schedule) -> Schedule:
    """Return the requested early-exit mode with the fastest depths and catch-up length.

    If the model's depths are unknown, the times are those of full mode.
    """
    mode, asked = problem.limits.mode or "", problem.limits.draft_length
    width = (problem.limits.draft_tree or 1) if mode == "specee" and _tree_lengths(problem) else 1
    unknown = replace(full, mode=mode, draft_length=asked or BEST_OF_DRAFTS, tree_width=width)
    lengths = _draft_lengths(problem)
    make_times = _times_maker(problem, placements, context_tokens, max(lengths))
    times, drafts = make_times(copies_ahead=False), problem.statistics.drafts
    draft_s = 0.0 if drafts is None else drafts.seconds(placements)
    found = [
        replace(
            unknown,
            draft_length=n,
            step=early_step(times, each, n, draft_s),
            exit_layers=each.planned,
            depths=each,
        )
        for each in problem.depths
        for n in lengths
    ]
    best = min(found, key=TOKEN_S, default=unknown)
    if best.depths is None or not times.has_streams:
        return best
    return replace(best, step=early_step(make_times(), best.depths, best.draft_length, draft_s))


def _times_maker(
    problem: Problem, placements: Sequence[Placement], context_tokens: int, longest: int
) -> Callable[..., StepTimes]:
    exits = problem.statistics.exits
    ranks = None if exits is None else exits.map_ranks
    return partial(StepTimes, problem.costs, problem.parts, placements, context_tokens, longest, map_ranks=ranks)


def _best_exact(problem: Problem, placements: Sequence[Placement], context_tokens: int) -> Schedule | None:
    """Return the fastest exact mode over all exit layers and draft lengths; None without statistics of drafts.

    With streamed weights, the choice assumes that each part costs the longer of copy and computing.
    """
    exits, drafts = problem.statistics.exits, problem.statistics.drafts
    if exits is None and drafts is None:
        return None
    make_times = _times_maker(problem, placements, context_tokens, most_drafted(problem))
    rough = make_times(copies_ahead=False)
    choices = _sequence_schedules(problem, rough)
    are_asked_trees = bool(problem.limits.draft_tree) and any(each.tree_width > 1 for each in choices)
    if not are_asked_trees:
        choices += _exit_schedules(problem, rough)
    best = min(choices, key=TOKEN_S, default=None)
    if best is None or best.exit_layer is None or not rough.has_streams:
        return best
    if best.drafts == SEQUENCE or exits is None:
        return min(_sequence_schedules(problem, make_times()), key=TOKEN_S)
    return _exit_schedule(make_times(), best.exit_layer, exits.rates_at(best.exit_layer), _draft_lengths(problem))


def neighbours(
    problem: Problem, placements: Sequence[Placement], context_tokens: int, chosen: Schedule
) -> dict[str, Schedule]:
    """Return similar exact modes by description: exit one layer earlier or later, one token more or fewer, or a chain
    in place of a tree."""
    exits, drafts, length = problem.statistics.exits, problem.statistics.drafts, chosen.draft_length
    times = _times_maker(problem, placements, context_tokens, max(length + 1, most_drafted(problem)))()
    lengths = {f"with at most {n} tokens a step": n for n in (length - 1, length + 1) if 1 < n <= MAX_DRAFT_LENGTH}
    if chosen.drafts == SEQUENCE and drafts is not None:
        found = {words: _sequence_schedule(times, drafts, n, chosen.tree_width) for words, n in lengths.items()}
        is_tree = chosen.tree_width > 1
        other = min(
            _chains(problem, times, drafts) if is_tree else _trees(problem, times, drafts), key=TOKEN_S, default=None
        )
        if other is not None:
            found[f"as a {'chain' if is_tree else 'tree'} of {other.draft_length} tokens"] = other
        return found
    assert exits is not None and chosen.exit_layer is not None, "what drafts was chosen by"
    layers = {"a layer earlier": chosen.exit_layer - 1, "a layer later": chosen.exit_layer + 1}
    known = {words: (layer, length) for words, layer in layers.items() if 0 < layer < problem.spec.n_layers}
    known |= {words: (chosen.exit_layer, n) for words, n in lengths.items()}
    return {words: _exit_schedule(times, layer, exits.rates_at(layer), [n]) for words, (layer, n) in known.items()}


def _draft_lengths(problem: Problem) -> Sequence[int]:
    asked = problem.limits.draft_length
    return [asked] if asked else range(2, BEST_OF_DRAFTS + 1)


def _exit_schedules(problem: Problem, times: StepTimes) -> list[Schedule]:
    exits, exit_layers = problem.statistics.exits, range(1, problem.spec.n_layers)
    if exits is None:
        return []
    rates = {exit_layer: exits.rates_at(exit_layer) for exit_layer in exit_layers}
    lengths = _draft_lengths(problem)
    return [_exit_schedule(times, layer, rates[layer], lengths) for layer in exit_layers if rates[layer].exit_rate > 0]


def _exit_schedule(times: StepTimes, exit_layer: int, rates: ExitRates, lengths: Sequence[int]) -> Schedule:
    """Return the schedule that drafts by exits at exit_layer, with the best of these draft lengths."""
    steps = times.exit_steps(exit_layer, rates, max(lengths))
    length = min(lengths, key=lambda n: steps[n - 1].seconds_per_token)
    return Schedule("exact", EXIT, exit_layer, length, steps[length - 1])


def _sequence_schedules(problem: Problem, times: StepTimes) -> list[Schedule]:
    """Return a schedule of draft sequences for each possible draft length, and of trees that are worth it."""
    drafts = problem.statistics.drafts
    if drafts is None:
        return []
    chains, trees = _chains(problem, times, drafts), _trees(problem, times, drafts)
    if trees and problem.limits.draft_tree:
        return trees
    limit_s = WORTH_IT * min(chain.token_s for chain in chains)
    return [*chains, *(tree for tree in trees if tree.token_s < limit_s)]


def _chains(problem: Problem, times: StepTimes, drafts: DraftRates) -> list[Schedule]:
    return [_sequence_schedule(times, drafts, n) for n in _draft_lengths(problem)]


def _trees(problem: Problem, times: StepTimes, drafts: DraftRates) -> list[Schedule]:
    """Return a schedule of draft trees for each possible number of tokens; none if the model or the source has none."""
    width = problem.limits.draft_tree or TREE_WIDTH
    return [_sequence_schedule(times, drafts, n, width) for n in _tree_lengths(problem)]


def _tree_lengths(problem: Problem) -> Sequence[int]:
    drafts, limits = problem.statistics.drafts, problem.limits
    if drafts is None or not drafts.others or limits.draft_tree == 1 or not has_trees(problem.spec):
        return ()
    return TREE_LENGTHS if limits.draft_length is None else [limits.draft_length]


def most_drafted(problem: Problem) -> int:
    """Return the most tokens of a verification, over all drafts that are compared."""
    return max([*_draft_lengths(problem), *_tree_lengths(problem)])


def _sequence_schedule(times: StepTimes, drafts: DraftRates, length: int, width: int = 1) -> Schedule:
    step = times.sequence_step(drafts, length) if width == 1 else times.tree_step(drafts, length, width)
    return Schedule("exact", SEQUENCE, 0, length, step, tree_width=width)
