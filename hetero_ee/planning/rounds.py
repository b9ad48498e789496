"""Expected time of exact early exit: drafts that exit at a boundary, verified in one batched pass.

A round: rows 1, 2, ... run through the layers before the boundary; each but the last exits there and its draft is the
next row's token; the last cannot exit, or the queue is full. Then one pass takes all rows through the layers behind and
through the head, which keeps the drafts up to the first wrong one and gives one token more.
Source: derived; the gated form of Leviathan-style self-speculation with the batch cost measured (docs/planning.md).
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExitRates:
    """At one boundary: the chance that a row exits, and that an exited row's draft is the full model's token."""

    exit_rate: float
    precision: float

    def __post_init__(self) -> None:
        for name, value in (("exit_rate", self.exit_rate), ("precision", self.precision)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, expected 0 to 1")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round costs and brings, on average."""

    seconds: float
    tokens: float
    rows: float

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens


def expected_round(rates: ExitRates, draft_tokens: int, draft_s: float, verify_s: Callable[[int], float]) -> Round:
    """The average round with at most `draft_tokens` rows in its verification.

    draft_s: one row through the layers before the boundary, its exit head included. verify_s(m): m rows through the
    rest and the full head.
    """
    p, q = rates.exit_rate, rates.precision
    seconds = tokens = rows = 0.0
    for n_rows in range(1, draft_tokens + 1):
        n_exits = n_rows - 1
        chance = p**n_exits * (1.0 if n_rows == draft_tokens else 1 - p)
        kept = sum(q**j for j in range(n_exits + 1))  # j drafts right in a row give j + 1 tokens
        seconds += chance * (n_rows * draft_s + verify_s(n_rows))
        tokens += chance * kept
        rows += chance * n_rows
    return Round(seconds, tokens, rows)
