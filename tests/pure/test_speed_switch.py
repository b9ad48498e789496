"""SpeculationSwitch: drafting goes on where it is faster, stops where it is not, and is tried again; no token depends
on it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from hetero_ee.speculation.speed_switch import SpeculationSwitch
from tests.scripted_model import KINDS, PROMPT, ScriptedModel, decoding, drafted, successor, wrong_at

TOKENS_A_STEP = 3


def drafted_share(
    seconds_of: Callable[[bool, int], float], n_tokens: int, switch: SpeculationSwitch | None = None
) -> float:
    """The share of tokens from steps that draft; seconds_of(drafts, tokens so far): of a step of that kind."""
    switch, n, n_drafted = switch or SpeculationSwitch(), 0, 0
    while n < n_tokens:
        drafts = switch.drafts
        new = TOKENS_A_STEP if drafts else 1
        switch.ended(seconds_of(drafts, n), new)
        n, n_drafted = n + new, n_drafted + new * drafts
    return n_drafted / n


@pytest.mark.parametrize(
    ("draft_s", "least", "most"), [(2.0, 0.9, 1.0), (2.9, 0.9, 1.0), (3.1, 0.0, 0.1), (9.0, 0.0, 0.1)]
)
def test_the_faster_kind_is_kept(draft_s: float, least: float, most: float) -> None:
    """A plain token takes 1 s; a step that drafts brings 3."""
    assert least <= drafted_share(lambda drafts, n: draft_s if drafts else 1.0, 5000) <= most


def test_a_change_is_noticed() -> None:
    switch = SpeculationSwitch()
    assert drafted_share(lambda drafts, n: 9.0 if drafts else 1.0, 2000, switch) < 0.15
    assert drafted_share(lambda drafts, n: 1.5 if drafts else 1.0, 12000, switch) > 0.5


def test_one_slow_step_decides_nothing() -> None:
    """As where the system did something else: the first step of a trial is cold, others are averaged."""
    share = drafted_share(lambda drafts, n: 60.0 if drafts and n == 0 else (2.0 if drafts else 1.0), 3000)
    assert share > 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_full_mode_whatever_it_says(kind: str) -> None:
    prompts = [PROMPT, [20, 21]]
    model, how = drafted(kind, wrong_at(5, 9, 10, 14))
    full = decoding(ScriptedModel(successor, successor), None, prompts, 60)
    found = decoding(model, replace(how, switch=SpeculationSwitch(_left=3)), prompts, 60)
    assert sorted(map(str, found)) == sorted(map(str, full))
    assert {len(one.batch) > 2 for one in model.verifications} == {False, True}  # with drafts and without
