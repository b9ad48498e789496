"""Pace: drafting goes on where it is faster, stops where it is not, and is tried again; no token depends on it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hetero_ee.speculation.draft_pace import Pace

from hetero_ee.decoding.full import generate
from hetero_ee.speculation.exact import generate_exact
from tests.pure.test_exact_faults import PROMPTS, arguments, drafting
from tests.scripted_model import ScriptedModel, successor, wrong_at

TOKENS_A_ROUND = 3


def drafted_share(seconds_of: Callable[[bool, int], float], n_tokens: int, pace: Pace | None = None) -> float:
    """The share of tokens from drafting rounds; seconds_of(drafts, tokens so far): of a round of that kind."""
    pace, n, n_drafted = pace or Pace(), 0, 0
    while n < n_tokens:
        drafts = pace.drafts
        new = TOKENS_A_ROUND if drafts else 1
        pace.ended(seconds_of(drafts, n), new)
        n, n_drafted = n + new, n_drafted + new * drafts
    return n_drafted / n


@pytest.mark.parametrize(
    ("draft_s", "least", "most"), [(2.0, 0.9, 1.0), (2.9, 0.9, 1.0), (3.1, 0.0, 0.1), (9.0, 0.0, 0.1)]
)
def test_the_faster_kind_is_kept(draft_s: float, least: float, most: float) -> None:
    """A plain token takes 1 s; a drafting round brings 3 tokens."""
    assert least <= drafted_share(lambda drafts, n: draft_s if drafts else 1.0, 5000) <= most


def test_a_change_is_noticed() -> None:
    pace = Pace()
    assert drafted_share(lambda drafts, n: 9.0 if drafts else 1.0, 2000, pace) < 0.15
    assert drafted_share(lambda drafts, n: 1.5 if drafts else 1.0, 12000, pace) > 0.5


def test_one_slow_round_decides_nothing() -> None:
    """As where the system did something else: the first round of a trial is cold, others are averaged."""
    share = drafted_share(lambda drafts, n: 60.0 if drafts and n == 0 else (2.0 if drafts else 1.0), 3000)
    assert share > 0.85


def test_tokens_are_those_of_full_mode_whatever_the_pace() -> None:
    model = ScriptedModel(successor, wrong_at({5, 9, 10, 14}))
    expected = [(token.sequence, token.token_id) for token in generate(model, PROMPTS, *arguments(60))]  # type: ignore[arg-type]
    found = generate_exact(model, PROMPTS, *arguments(60), replace(drafting(), pace=Pace(_left=3)))  # type: ignore[arg-type]
    texts = [(token.sequence, token.token_id) for token in found]
    assert sorted(texts, key=lambda each: each[0]) == sorted(expected, key=lambda each: each[0])
