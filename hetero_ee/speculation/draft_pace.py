"""Pace: whether drafting is faster than not, by the clock. Its answers change the speed, never a token.

A plan weighs expected times; what Python, the sampler and this text's acceptance add to them shows only here. Rounds of
both kinds are timed, the faster kind goes on, and the other is tried again from time to time. Derived.
"""

from dataclasses import dataclass, field

FIRST_TOKENS = 24  # of each kind before the first decision: the spread of a dozen rounds
HELD_TOKENS = 160  # decoded in the faster way before the other is tried again; doubles while the decision stands
MAX_HELD_TOKENS = 2560
DECAY = 0.5  # of what was known of a kind, each time it is tried again


@dataclass(slots=True)
class _Kind:
    """Seconds and tokens of rounds of one kind; the first round of each trial, cold, is left out."""

    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Pace:
    """Ask `drafts` before a round, tell `ended` after it. Goes on from text to text."""

    _kinds: dict[bool, _Kind] = field(default_factory=lambda: {True: _Kind(), False: _Kind()})
    _now: bool = True
    _left: float = FIRST_TOKENS
    _is_trial: bool = True
    _is_cold: bool = True
    _held: float = HELD_TOKENS

    @property
    def drafts(self) -> bool:
        """Whether the next round drafts."""
        return self._now

    def ended(self, seconds: float, n_tokens: int) -> None:
        """A round of the kind that `drafts` said took so long and brought so many tokens."""
        if not self._is_cold:
            kind = self._kinds[self._now]
            kind.seconds, kind.tokens = kind.seconds + seconds, kind.tokens + n_tokens
        self._is_cold = False
        self._left -= n_tokens
        if self._left <= 0:
            self._turn()

    def _turn(self) -> None:
        other = self._kinds[not self._now]
        if other.tokens == 0 or not self._is_trial:
            other.seconds, other.tokens = DECAY * other.seconds, DECAY * other.tokens
            self._begin(not self._now, FIRST_TOKENS, is_trial=True)
            return
        faster = self._kinds[True].seconds_per_token <= self._kinds[False].seconds_per_token
        self._held = HELD_TOKENS if faster == self._now else min(MAX_HELD_TOKENS, 2 * self._held)
        self._begin(faster, self._held, is_trial=False)

    def _begin(self, drafts: bool, n_tokens: float, *, is_trial: bool) -> None:
        kind = self._kinds[drafts]
        if not is_trial:  # what it will be checked against later is what it does now
            kind.seconds, kind.tokens = DECAY * kind.seconds, DECAY * kind.tokens
        self._is_cold = drafts != self._now
        self._now, self._left, self._is_trial = drafts, n_tokens, is_trial
