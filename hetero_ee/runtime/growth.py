"""Growth: larger plans for a default context, made when a request needs more tokens than it holds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hetero_ee.planning.context import grown
from hetero_ee.planning.plan import Plan

SAME_SPEED = 0.01  # smaller changes of the rate are not reported


@dataclass(slots=True)
class Growth:
    """How an executor's context grows. Refused plans are not tried again."""

    plan_for: Callable[[Plan, int], Plan]  # replaces this plan by one for that many tokens; raises UsageError
    token_s: Callable[[Plan, int], float | None]  # expected seconds per token after that many tokens
    most_tokens: int  # the model's own context
    warn: Callable[[str], None]  # told in a sentence of each growth
    refused_tokens: int | None = None
    outgrown: list[int] = field(default_factory=list)  # contexts that were too short

    def larger(self, plan: Plan, n_tokens: int) -> Plan | None:
        """Return a plan for at least n_tokens, or None if this one suffices or none can be made."""
        if n_tokens <= plan.context_tokens or (self.refused_tokens is not None and n_tokens >= self.refused_tokens):
            return None
        found = grown(partial(self.plan_for, plan), plan.context_tokens, n_tokens, self.most_tokens)
        if found is None and n_tokens <= self.most_tokens:
            self.refused_tokens = n_tokens
        return found

    def tell(self, before: Plan, after: Plan) -> None:
        """Report that one plan replaces the other."""
        self.outgrown.append(before.context_tokens)
        depth = before.context_tokens
        old_s, new_s = self.token_s(before, depth), self.token_s(after, depth)
        speed = ""
        if old_s and new_s:
            same = abs(new_s / old_s - 1) < SAME_SPEED
            rates = f"{1 / new_s:.3g} instead of {1 / old_s:.3g} tokens/s are expected from here on"
            speed = ", and the speed stays the same" if same else f", and {rates}"
        self.warn(
            f"The context grew from {before.context_tokens:,} to {after.context_tokens:,} tokens: a text needs "
            f"them{speed}."
        )
