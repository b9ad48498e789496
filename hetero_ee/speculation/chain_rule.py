"""ChainRule: the gate's marginal rule for chains, whose computed drafts take time before they are seen.

One more draft is worth making while the chance that it counts x the seconds a token takes now is more than the seconds
that it and its row take. The first computed draft is always made, so that its chance stays known. Repeated n-grams cost
nothing but their rows. Derived, as draft_gate.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hetero_ee.speculation.draft_gate import AdaptiveGate


@dataclass(frozen=True, slots=True)
class ChainRule:
    """gate: learns what drafts are worth; a row costs nothing before its exit layer. draft_s: of one computed draft.

    chances: that each draft of a chain is right where all before it are.
    """

    gate: AdaptiveGate
    draft_s: float

    def goes_on(self, chances: Sequence[float]) -> bool:
        """Whether one more computed draft is worth making behind these; its own chance is the average one."""
        gain_s = prod(chances) * self.gate.mean_chance * self.gate.seconds_per_token
        return gain_s > self.draft_s + self.gate.row_s(1 + len(chances))

    def following(self, chances: Sequence[float], free: Sequence[float]) -> int:
        """How many drafts that cost nothing, with these chances, are worth their rows behind the others."""
        counts = prod(chances)
        for n_taken, chance in enumerate(free):
            counts *= chance
            if counts * self.gate.seconds_per_token <= self.gate.row_s(1 + len(chances) + n_taken):
                return n_taken
        return len(free)

    def leading(self, free: Sequence[float], n_tokens: int) -> int:
        """How many drafts that cost nothing save more seconds than any number of computed ones up to n_tokens; 0 where
        those save more."""
        n_free, saved_s = self._best(free, 0.0)
        _, computed_s = self._best([self.gate.mean_chance] * n_tokens, self.draft_s)
        return n_free if saved_s > computed_s else 0

    def _best(self, chances: Sequence[float], draft_s: float) -> tuple[int, float]:
        """How many of these drafts save most, and the seconds."""
        best, saved_s, counts = (0, 0.0), 0.0, 1.0
        for n_rows, chance in enumerate(chances, 1):
            counts *= chance
            saved_s += counts * self.gate.seconds_per_token - draft_s - self.gate.row_s(n_rows)
            best = max(best, (n_rows, saved_s), key=lambda found: found[1])
        return best
