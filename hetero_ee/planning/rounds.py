"""Expected time of exact decoding: drafts that exit at a boundary or come from elsewhere, verified in one pass.

A round: rows 1, 2, ... run through the layers before the boundary; each but the last exits there and its draft is the
next row's token; the last cannot exit, or the queue is full. Then one pass takes all rows through the layers behind and
through the head, which keeps the drafts up to the first wrong one and gives one token more. Drafts from elsewhere, an
n-gram source or a draft head, make a chain of a fixed length, and all rows of it take every layer in one pass.
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


def expected_rounds(
    rates: ExitRates, max_draft_tokens: int, draft_s: float, verify_s: Callable[[int], float]
) -> list[Round]:
    """The average rounds with at most 1, 2, ... `max_draft_tokens` rows in their verification.

    draft_s: one row through the layers before the boundary, its exit head included. verify_s(m): m rows through the
    rest and the full head.
    """
    p, q = rates.exit_rate, rates.precision
    seconds = tokens = rows = kept = 0.0
    found = []
    for n_rows in range(1, max_draft_tokens + 1):
        n_exits = n_rows - 1
        chance = p**n_exits  # of getting so far; without another exit the round ends here
        kept += q**n_exits  # j drafts right in a row give j + 1 tokens
        round_s = n_rows * draft_s + verify_s(n_rows)
        found.append(Round(seconds + chance * round_s, tokens + chance * kept, rows + chance * n_rows))
        ends = chance * (1 - p)
        seconds, tokens, rows = seconds + ends * round_s, tokens + ends * kept, rows + ends * n_rows
    return found


def chain_round(
    n_rows: int, acceptance_at: Callable[[int], float], draft_s: float, pass_s: Callable[[int], float]
) -> Round:
    """The average round of n_rows - 1 drafts and the row they follow.

    acceptance_at(j): the chance that draft j is right where all before it are. pass_s(m): m rows through all layers.
    """
    tokens = right = 1.0
    for position in range(n_rows - 1):
        right *= acceptance_at(position)
        tokens += right
    return Round((n_rows - 1) * draft_s + pass_s(n_rows), tokens, float(n_rows))
