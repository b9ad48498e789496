"""Expected time of exact decoding: drafts that exit at an exit layer or come from elsewhere, verified in one pass.

A round: rows 1, 2, ... run through the layers before the exit layer; each but the last exits there, or at a level on
the way, and its draft is the next row's token; the last cannot exit, or the queue is full. Then one pass takes all rows
through the layers behind and through the head, which keeps the drafts up to the first wrong one and gives one token
more. Drafts from elsewhere, an n-gram source or a draft head, make a chain of a fixed length, and all rows of it take
every layer in one pass.
Source: derived; the gated form of Leviathan-style self-speculation with the batch cost measured (docs/planning.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExitRates:
    """At one exit_layer: the chance that a row exits, and that an exited row's draft is the full model's token.

    refused_precision: the same of a row that does not exit, of the token likeliest there; 0 where it is not known.
    """

    exit_rate: float
    precision: float
    refused_precision: float = 0.0

    def __post_init__(self) -> None:
        _check_shares(self, "exit_rate", "precision", "refused_precision")


@dataclass(frozen=True, slots=True)
class WalkRates:
    """The same of a row that is judged at several exit layers alternately, the last of them the one it waits at.

    mean_exit_depth: layers that a row which exits has passed, on average, 0 where none does. n_evaluated: exit layers
    at which a row is judged, on average over all rows.
    """

    exit_rate: float
    precision: float
    refused_precision: float
    mean_exit_depth: float
    n_evaluated: float

    def __post_init__(self) -> None:
        _check_shares(self, "exit_rate", "precision", "refused_precision")
        for name in ("mean_exit_depth", "n_evaluated"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, expected 0 or more")


@dataclass(frozen=True, slots=True)
class LevelWalk:
    """A way through levels to an exit layer. places: 1 or more levels, ascending, then the exit layer. exit_shares: the
    chance of a row to exit at each; together the rates' exit_rate."""

    rates: WalkRates
    places: tuple[int, ...]
    exit_shares: tuple[float, ...]

    @property
    def levels(self) -> tuple[int, ...]:
        return self.places[:-1]


def _check_shares(rates: ExitRates | WalkRates, *names: str) -> None:
    for name in names:
        value = getattr(rates, name)
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


@dataclass(frozen=True, slots=True)
class WalkCosts:
    """exit_s: one row to where it exits, judged on the way; it waits there. last_s(m): the row behind, the m-th, to the
    exit layer, and what those that wait add to the passes that take them along. refused_s: judging a row everywhere, in
    vain. head_s: at the exit layer alone.
    """

    exit_s: float
    last_s: Callable[[int], float]
    refused_s: float
    head_s: float


def expected_rounds(
    rates: ExitRates, max_draft_tokens: int, draft_s: float, verify_s: Callable[[int], float], ahead_s: float = 0.0
) -> list[Round]:
    """The average rounds with at most 1, 2, ... `max_draft_tokens` rows in their verification.

    draft_s: one row through the layers before the exit layer, its exit head included. verify_s(m): m rows through the
    rest and the full head. ahead_s: what a round is shorter by where the row before its first was guessed right.
    """

    def round_s(n_rows: int, is_full: bool) -> float:
        return n_rows * draft_s + verify_s(n_rows) - ahead_s * guess_chance(rates, n_rows, is_full)

    return _gated_rounds(rates, max_draft_tokens, round_s)


def walk_rounds(
    walk: WalkRates, max_draft_tokens: int, costs: WalkCosts, verify_s: Callable[[int], float], ahead_s: float = 0.0
) -> list[Round]:
    """The same where rows are judged at levels on the way to the exit layer."""

    def round_s(n_rows: int, is_full: bool) -> float:
        judging_s = costs.head_s if is_full else costs.refused_s
        seconds = (n_rows - 1) * costs.exit_s + costs.last_s(n_rows) + judging_s + verify_s(n_rows)
        return seconds - ahead_s * guess_chance(walk, n_rows, is_full)

    return _gated_rounds(walk, max_draft_tokens, round_s)


def guess_chance(rates: ExitRates | WalkRates, n_rows: int, is_full: bool) -> float:
    """That all drafts of a round of n_rows rows are right and its last row's token too; 0 where that is not known.

    is_full: no row had room behind the last one, so that it was not asked whether it exits.
    """
    p, q, refused = rates.exit_rate, rates.precision, rates.refused_precision
    if not refused:
        return 0.0
    last: float = p * q + (1 - p) * refused if is_full else refused
    return float(q ** (n_rows - 1) * last)


def _gated_rounds(
    rates: ExitRates | WalkRates, max_draft_tokens: int, round_s: Callable[[int, bool], float]
) -> list[Round]:
    """round_s(n, is_full): seconds of a round of n rows. is_full: no more fit; else the last did not exit."""
    p, q = rates.exit_rate, rates.precision
    seconds = tokens = rows = kept = 0.0
    found = []
    for n_rows in range(1, max_draft_tokens + 1):
        n_exits = n_rows - 1
        chance = p**n_exits  # of getting so far; without another exit the round ends here
        kept += q**n_exits  # j drafts right in a row give j + 1 tokens
        full_s = seconds + chance * round_s(n_rows, True)
        found.append(Round(full_s, tokens + chance * kept, rows + chance * n_rows))
        ends = chance * (1 - p)
        seconds += ends * round_s(n_rows, False)
        tokens, rows = tokens + ends * kept, rows + ends * n_rows
    return found


def chain_round(
    n_rows: int, acceptance_at: Callable[[int], float], draft_s: float, pass_s: Callable[[int], float]
) -> Round:
    """The average round of n_rows - 1 drafts and the row they follow. Chains that end where a draft is doubtful, and
    n-grams around them, are faster (decoding/chain_rule.py): it promises the least.

    acceptance_at(j): the chance that draft j is right where all before it are. pass_s(m): m rows through all layers.
    """
    tokens = right = 1.0
    for position in range(n_rows - 1):
        right *= acceptance_at(position)
        tokens += right
    return Round((n_rows - 1) * draft_s + pass_s(n_rows), tokens, float(n_rows))
