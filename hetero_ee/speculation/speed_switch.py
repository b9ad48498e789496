"""Decides by the clock whether drafting is faster than not drafting. This changes the speed, never a token.

A plan only estimates times. Python, the sampler and the actual acceptance change them, which shows only while decoding.
So steps with and without drafts are timed, the faster kind continues, and the other is tried again from time to time.
Derived.
"""

from dataclasses import dataclass, field

FIRST_TOKENS = 24  # tokens of each kind before the first decision
HELD_TOKENS = 160  # decoded in the faster way before the other is tried again; doubles while the decision stands
MAX_HELD_TOKENS = 2560
DECAY = 0.5  # factor of a kind's old times when it is tried again


@dataclass(slots=True)
class _Kind:
    """Total time and tokens of steps with or without drafts. The cold first step of each trial is not counted."""

    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0

    def fade(self) -> None:
        self.seconds, self.tokens = DECAY * self.seconds, DECAY * self.tokens


@dataclass(slots=True)
class SpeculationSwitch:
    """Switch between steps with and without drafts. Its state lasts from request to request. Callers read `drafts`
    before a step and call `ended` after it."""

    drafts: bool = True  # whether the next step drafts
    _kinds: dict[bool, _Kind] = field(default_factory=lambda: {True: _Kind(), False: _Kind()})
    _left: float = FIRST_TOKENS
    _is_trial: bool = True
    _is_cold: bool = True
    _held: float = HELD_TOKENS

    def ended(self, seconds: float, n_tokens: int) -> None:
        """Record the seconds and emitted tokens of a finished step, which drafted if `drafts` is true."""
        if not self._is_cold:
            kind = self._kinds[self.drafts]
            kind.seconds, kind.tokens = kind.seconds + seconds, kind.tokens + n_tokens
        self._is_cold = False
        self._left -= n_tokens
        if self._left <= 0:
            self._decide()

    def _decide(self) -> None:
        other = self._kinds[not self.drafts]
        if other.tokens == 0 or not self._is_trial:
            other.fade()
            self._begin(not self.drafts, FIRST_TOKENS, is_trial=True)
            return
        faster = self._kinds[True].seconds_per_token <= self._kinds[False].seconds_per_token
        self._held = HELD_TOKENS if faster == self.drafts else min(MAX_HELD_TOKENS, 2 * self._held)
        self._kinds[faster].fade()  # so that later comparisons use recent times
        self._begin(faster, self._held, is_trial=False)

    def _begin(self, drafts: bool, n_tokens: float, *, is_trial: bool) -> None:
        self._is_cold = drafts != self.drafts
        self.drafts, self._left, self._is_trial = drafts, n_tokens, is_trial
