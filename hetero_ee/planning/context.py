"""Chooses a plan's context length if the user gave none, as long as it costs no speed, and enlarges it later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from hetero_ee.errors import UsageError
from hetero_ee.planning.candidates import Candidate, best_candidate, completed
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.problem import Problem
from hetero_ee.planning.schedule import best_schedule

USUAL_TOKENS = 4096  # a choice holds this many if it can
LEAST_TOKENS = 256  # nothing shorter is tried
FREE = 0.98  # of the rate with USUAL_TOKENS: a longer context that keeps it costs nothing
LONGEST_PREDICTED_TOKENS = 8192  # context length for which rates are predicted at most: few texts are longer
GROWTHS = (2.0, 1.5, 1.25)  # once or more, the first that can be planned: large, since the text is read again
AFTER = 1.125  # of the tokens needed now, so that the text after a prompt does not need more at once
ROUND_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """The best candidate for a context length."""

    candidate: Candidate
    reason: str = ""  # for this context, where it was chosen and is not the model's own


def best_in_context(problem: Problem, predict_at_tokens: int) -> Choice:
    """Return the best candidate for the problem's context length.

    Args:
        predict_at_tokens: context length that rates are predicted for; 0 for half of the problem's, or
            LONGEST_PREDICTED_TOKENS if that is less.

    Raises:
        UsageError: if nothing fits.
    """
    at_tokens = predict_at_tokens or min(max(1, problem.context_tokens // 2), LONGEST_PREDICTED_TOKENS)
    return Choice(best_candidate(problem, at_tokens))


def best_context(problem: Problem, predict_at_tokens: int) -> Choice:
    """Return the best candidate for the longest context, up to the problem's, that costs no speed.

    Contexts are compared by their speed after the same number of tokens. The search is a bisection, since each context
    needs a plan of its own.

    Args:
        predict_at_tokens: see best_in_context.

    Raises:
        UsageError: if no context fits.
    """
    whole = problem.context_tokens
    usual = min(whole, USUAL_TOKENS)
    contexts = _Contexts(problem, predict_at_tokens, predict_at_tokens or max(1, usual // 2))
    least, smaller = contexts.at(usual), usual
    while least is None and smaller > LEAST_TOKENS:
        smaller //= 2
        least = contexts.at(smaller)
    if least is None:
        assert contexts.refusal is not None, "what has no plan was refused"
        raise contexts.refusal
    longest = _longest([smaller, *_doublings(usual, whole)], lambda size: contexts.keeps_speed(size, least))
    chosen = contexts.at(longest)
    assert chosen is not None, "what does not fit keeps no speed"
    return chosen if longest == whole else replace(chosen, reason=contexts.reason(chosen))


def grown(plan_for: Callable[[int], Plan], present_tokens: int, n_tokens: int, most_tokens: int) -> Plan | None:
    """Return a plan for a context of at least n_tokens, to replace one for present_tokens; None if none fits.

    Args:
        plan_for: makes a plan for a context length, or raises a UsageError.
        most_tokens: the longest context allowed.
    """
    if n_tokens > most_tokens:
        return None
    wanted = [_grown_by(growth, present_tokens, AFTER * n_tokens) for growth in GROWTHS]
    rounded = [-(-size // ROUND_TOKENS) * ROUND_TOKENS for size in (*wanted, n_tokens)]
    for size in dict.fromkeys(min(most_tokens, size) for size in rounded):
        try:
            return plan_for(size)
        except UsageError:
            continue
    return None


class _Contexts:
    """Plans of one problem for different contexts, each made once. Speeds are compared after at_tokens tokens."""

    def __init__(self, problem: Problem, predict_at_tokens: int, at_tokens: int) -> None:
        self._problem, self._predict_at_tokens, self._at_tokens = problem, predict_at_tokens, at_tokens
        self._known: dict[int, Choice | None] = {}
        self.refusal: UsageError | None = None  # the latest

    def at(self, context_tokens: int) -> Choice | None:
        """Return the best candidate for this context length, None if nothing fits."""
        if context_tokens not in self._known:
            self._known[context_tokens] = self._made(replace(self._problem, context_tokens=context_tokens))
        return self._known[context_tokens]

    def keeps_speed(self, context_tokens: int, least: Choice) -> bool:
        """Return whether a plan for this context is about as fast as `least`, the one for the shortest context."""
        found = self.at(context_tokens)
        if found is None:
            return False
        mine, others = self._at_depth(found), self._at_depth(least)
        return FREE * mine.schedule.token_s <= others.schedule.token_s and FREE * mine.request_s <= others.request_s

    def reason(self, chosen: Choice) -> str:
        """Return a sentence that explains why the chosen context is shorter than the model's own."""
        whole = self.at(self._problem.context_tokens)
        cost = "does not fit"
        if whole is not None:
            rates = f"{self._rate(whole):.3g} instead of {self._rate(chosen):.3g} tokens/s"
            cost = f"would run at {rates} after {self._at_tokens:,} tokens"
        return (
            f"Context {chosen.candidate.problem.context_tokens:,} tokens, chosen because -c "
            f"{self._problem.context_tokens}, the model's own, {cost}; without -c it grows when a text needs it."
        )

    def _made(self, problem: Problem) -> Choice | None:
        try:
            return best_in_context(problem, self._predict_at_tokens)
        except UsageError as refusal:
            self.refusal = refusal
            return None

    def _rate(self, found: Choice) -> float:
        """Return the generated tokens per second after `at_tokens` tokens of context."""
        return 1 / self._at_depth(found).schedule.token_s

    def _at_depth(self, found: Choice) -> Candidate:
        """Return the candidate with its times recomputed for a context of `at_tokens`, as comparisons need."""
        made, at_tokens = found.candidate, self._at_tokens
        if made.context_tokens == at_tokens:
            return made
        schedule = best_schedule(made.problem, made.decode, at_tokens)
        return completed(made.problem, made.decode, made.chunk_tokens, at_tokens, schedule)


def _grown_by(growth: float, n_tokens: int, at_least: float) -> int:
    while n_tokens < at_least:
        n_tokens = ceil(growth * n_tokens)
    return n_tokens


def _doublings(first: int, last: int) -> list[int]:
    """Return `first` times 2, 4, 8 and so on while below `last`, then `last`."""
    sizes = []
    while first < last:
        first = min(2 * first, last)
        sizes.append(first)
    return sizes


def _longest(sizes: Sequence[int], is_free: Callable[[int], bool]) -> int:
    """Return the last of the ascending `sizes` that is_free accepts, by bisection. It must accept the first."""
    low, high = 0, len(sizes) - 1
    if is_free(sizes[high]):
        return sizes[high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_free(sizes[middle]) else (low, middle)
    return sizes[low]
