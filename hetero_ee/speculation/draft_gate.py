"""Gate: whether one more draft is worth its row.

A draft counts only if every draft before it is right, and costs its rows whether it is right or not. With the chances
p_1 ... p_n of a round's drafts, the n-th is worth making while

    p_1 p_2 ... p_n  x  seconds a token takes now  >  draft_s + verify_s(n + 1) - verify_s(n)

Derived: the marginal rule for the best ratio of tokens to seconds; "now" is the average over the last rounds by the
same costs, so that the gate asks more of a draft the better it goes.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import prod
from typing import Protocol

BIN_EDGES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)  # finer where a chain of drafts needs it
PRIOR_DRAFTS = 8.0  # drafts that what was believed before weighs in each bin
DRAFT_DECAY = 0.998  # of a bin's counts at each draft: half is forgotten after 350
PRIOR_TOKENS = 32.0  # tokens that full mode's time weighs at the start
ROUND_DECAY = 0.98  # of seconds and tokens at each round: half is forgotten after 35


class Gate(Protocol):
    """Asked at every draft and told what became of it. Its answers change the speed, never a token."""

    def goes_on(self, sequence: int, confidence: float, n_pending: int) -> bool:
        """Whether a draft of this confidence becomes the next row, behind n_pending rows of its sequence, 1 or more."""

    def audit(self, confidence: float, was_right: bool) -> None:
        """A draft that it was asked about, whatever it said, when all drafts before it were right."""

    def settle(self, n_rows: int, n_tokens: int) -> None:
        """A sequence's rows were verified and brought so many tokens."""


class FixedGate:
    """Goes on from a confidence of `threshold`."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def goes_on(self, sequence: int, confidence: float, n_pending: int) -> bool:
        """See Gate.goes_on."""
        return confidence >= self._threshold

    def audit(self, confidence: float, was_right: bool) -> None:
        """Learns nothing."""

    def settle(self, n_rows: int, n_tokens: int) -> None:
        """Learns nothing."""


class AdaptiveGate:
    """The marginal rule, with chances learned from what verification finds: the same answers for the same drafts.

    draft_s: one row through the layers before the exit layer, exit head included. verify_s(m): m rows through the rest
    and the head. calibrated: the chance that a draft of some confidence is right, as known before; None takes the
    confidence for it.
    """

    def __init__(
        self,
        draft_s: float,
        verify_s: Callable[[int], float],
        calibrated: Callable[[float], float] | None = None,
    ) -> None:
        self._draft_s, self._verify_s = draft_s, cache(verify_s)
        edges = (0.0, *BIN_EDGES, 1.0)
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        self._prior = [min(1.0, max(0.0, calibrated(middle) if calibrated else middle)) for middle in middles]
        self._right = [0.0] * len(middles)
        self._checked = [0.0] * len(middles)
        self._seconds = PRIOR_TOKENS * (draft_s + verify_s(1))
        self._tokens = PRIOR_TOKENS
        self._chances: dict[int, list[float]] = {}  # of each sequence's pending drafts

    @property
    def seconds_per_token(self) -> float:
        """What a token takes now, by the costs."""
        return self._seconds / self._tokens

    @property
    def mean_chance(self) -> float:
        """That a draft is right of which nothing is known."""
        n_bins = len(self._prior)
        right = PRIOR_DRAFTS * sum(self._prior) + sum(self._right)
        return right / (PRIOR_DRAFTS * n_bins + sum(self._checked))

    def row_s(self, n_rows: int) -> float:
        """Seconds that one more row adds to the verification of n_rows."""
        return self._verify_s(n_rows + 1) - self._verify_s(n_rows)

    def spend(self, seconds: float) -> None:
        """A round takes so much longer than its rows do."""
        self._seconds += seconds

    def chance(self, confidence: float) -> float:
        """That a draft of this confidence is right: the mean of its bin's Beta posterior."""
        place = bisect_right(BIN_EDGES, confidence)
        right = PRIOR_DRAFTS * self._prior[place] + self._right[place]
        return right / (PRIOR_DRAFTS + self._checked[place])

    def goes_on(self, sequence: int, confidence: float, n_pending: int) -> bool:
        """See Gate.goes_on."""
        chances = [*self._chances.get(sequence, [])[: n_pending - 1], self.chance(confidence)]
        self._chances[sequence] = chances
        return prod(chances) * self.seconds_per_token > self._draft_s + self.row_s(n_pending)

    def audit(self, confidence: float, was_right: bool) -> None:
        """See Gate.audit."""
        place = bisect_right(BIN_EDGES, confidence)
        self._right[place] = DRAFT_DECAY * self._right[place] + was_right
        self._checked[place] = DRAFT_DECAY * self._checked[place] + 1

    def settle(self, n_rows: int, n_tokens: int) -> None:
        """See Gate.settle."""
        self._seconds = ROUND_DECAY * self._seconds + n_rows * self._draft_s + self._verify_s(n_rows)
        self._tokens = ROUND_DECAY * self._tokens + n_tokens
