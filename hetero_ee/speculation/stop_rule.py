"""Stop rule: decides whether one more draft is worth its time and its token in the verification.

A draft counts only if every draft before it is right, and costs its time whether it is right or not. With the chances
p_1 ... p_n of a step's drafts, the n-th draft is worth computing while

    p_1 p_2 ... p_n  x  seconds per token  >  draft_s + verify_s(b + n + 1) - verify_s(b + n)

b is the number of tokens of other requests in the same pass. Derived: the marginal rule for the best ratio of tokens to
seconds. The seconds per token are an average over the last steps by the same costs. So the better decoding goes, the
more a draft has to save. The rule changes the speed, never a token.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from math import prod

BIN_EDGES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)  # finer where a draft sequence needs it
PRIOR_DRAFTS = 8.0  # drafts that the first belief in a kind weighs
DRAFT_DECAY = 0.998  # factor of a kind's counts per draft: half is forgotten after 350
PRIOR_TOKENS = 32.0  # tokens that full mode's time weighs at the start
STEP_DECAY = 0.98  # factor of seconds and tokens per step: half is forgotten after 35


class LearnedChances:
    """Chances that drafts of several kinds are right: the means of Beta posteriors, which start at `priors`."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._priors = priors
        self._right = [0.0] * len(priors)
        self._checked = [0.0] * len(priors)

    @property
    def mean(self) -> float:
        """Chance that a draft of an unknown kind is right."""
        right = PRIOR_DRAFTS * sum(self._priors) + sum(self._right)
        return right / (PRIOR_DRAFTS * len(self._priors) + sum(self._checked))

    def of(self, kind: int) -> float:
        return (PRIOR_DRAFTS * self._priors[kind] + self._right[kind]) / (PRIOR_DRAFTS + self._checked[kind])

    def add(self, kind: int, was_right: bool) -> None:
        self._right[kind] = DRAFT_DECAY * self._right[kind] + was_right
        self._checked[kind] = DRAFT_DECAY * self._checked[kind] + 1


class FixedThreshold:
    """Drafts while a draft's chance is at least `threshold`. For machines with unknown costs; learns nothing."""

    mean_chance = 1.0  # another computed draft is always worth asking for
    draft_s = 0.0
    n_beside = 0  # see MarginalRule

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def chance(self, confidence: float) -> float:
        return confidence

    def is_worth(self, chances: Sequence[float], draft_s: float, n_drafts: int | None = None) -> bool:
        return chances[-1] >= self._threshold

    def best_length(self, chances: Sequence[float], draft_s: float) -> tuple[int, float]:
        n_worth = next((n for n, chance in enumerate(chances) if chance < self._threshold), len(chances))
        return n_worth, 0.0  # no seconds are known, so that free drafts never begin where others are computed

    def audit(self, confidence: float, was_right: bool) -> None:
        """See MarginalRule."""

    def settle(self, n_verified: int, n_tokens: int, n_in_pass: int) -> None:
        """See MarginalRule."""

    def spend(self, seconds: float) -> None:
        """See MarginalRule."""


class MarginalRule:
    """The marginal rule, with chances learned from verified drafts. The same drafts lead to the same decisions.

    draft_s: seconds of one token through the layers before the exit layer and of its judgement; 0 with draft sources.
    verify_s(m): seconds of m tokens through the remaining layers and the lm_head.
    """

    def __init__(self, draft_s: float, verify_s: Callable[[int], float]) -> None:
        self.draft_s, self._verify_s = draft_s, cache(verify_s)
        self.n_beside = 0  # tokens of other requests in the pass that drafts are for
        self._chances = LearnedChances([(low + high) / 2 for low, high in pairwise((0.0, *BIN_EDGES, 1.0))])
        self._seconds = PRIOR_TOKENS * (draft_s + verify_s(1))
        self._tokens = PRIOR_TOKENS

    @property
    def seconds_per_token(self) -> float:
        """Recent average of the seconds per token, estimated from the costs."""
        return self._seconds / self._tokens

    @property
    def mean_chance(self) -> float:
        """Chance that a draft of unknown confidence is right."""
        return self._chances.mean

    def chance(self, confidence: float) -> float:
        """Return the chance that a draft of this confidence is right: the mean of its bin's Beta posterior."""
        return self._chances.of(bisect_right(BIN_EDGES, confidence))

    def is_worth(self, chances: Sequence[float], draft_s: float, n_drafts: int | None = None) -> bool:
        """Return whether the last of these drafts is worth draft_s seconds and one more token in the verification.

        Args:
            n_drafts: Number of the step's drafts with this one; None if it has only these, as a chain does.
        """
        n_drafts = len(chances) if n_drafts is None else n_drafts
        return prod(chances) * self.seconds_per_token > draft_s + self._token_s(n_drafts)

    def best_length(self, chances: Sequence[float], draft_s: float) -> tuple[int, float]:
        """Return the number of these drafts, draft_s seconds each, that saves most time, and the seconds saved."""
        best, saved_s = (0, 0.0), 0.0
        for n in range(1, len(chances) + 1):
            saved_s += prod(chances[:n]) * self.seconds_per_token - draft_s - self._token_s(n)
            best = max(best, (n, saved_s), key=lambda found: found[1])
        return best

    def audit(self, confidence: float, was_right: bool) -> None:
        """Learn from a verification whether a token of this confidence, drafted or not, was right."""
        self._chances.add(bisect_right(BIN_EDGES, confidence), was_right)

    def settle(self, n_verified: int, n_tokens: int, n_in_pass: int) -> None:
        """Learn from a request's step that verified n_verified tokens and emitted n_tokens.

        Args:
            n_in_pass: Number of tokens of all requests in the pass, which share its time.
        """
        verify_s = self._verify_s(n_in_pass) * n_verified / n_in_pass
        self._seconds = STEP_DECAY * self._seconds + n_verified * self.draft_s + verify_s
        self._tokens = STEP_DECAY * self._tokens + n_tokens

    def spend(self, seconds: float) -> None:
        """Add seconds that a step needed in addition to its tokens."""
        self._seconds += seconds

    def _token_s(self, n_tokens: int) -> float:
        """Return the seconds that one more token adds to a verification with n_tokens of the same request."""
        n_before = self.n_beside + n_tokens
        return self._verify_s(n_before + 1) - self._verify_s(n_before)


StopRule = MarginalRule | FixedThreshold
