"""How far a chain goes: the marginal rule for drafts that take time before they are seen, and for free ones."""

import pytest
import torch
from hetero_ee.speculation.chain_rule import ChainRule
from hetero_ee.speculation.draft_chain import DraftChain
from hetero_ee.speculation.draft_gate import AdaptiveGate

from hetero_ee.planning.plan import NGRAM, SEQUENCE

ROW_S, DRAFT_S = 0.05, 0.2
END, LOGITS = 9, torch.tensor([0.0, 5.0, 0.0, 0.0])


def rule(mean_chance: float = 0.5, draft_s: float = DRAFT_S) -> ChainRule:
    """Full mode's token takes a second; drafts are right as often as mean_chance, whatever their confidence."""
    return ChainRule(AdaptiveGate(0.0, lambda m: 1 + ROW_S * (m - 1), lambda _: mean_chance), draft_s)


@pytest.mark.parametrize(
    ("chances", "goes_on"),
    [
        ([], True),
        ([0.6], True),  # 0.6 x 0.5 of a token's second is more than a draft's 0.2 and a row's 0.05
        ([0.49], False),
        ([0.8, 0.8], True),
        ([0.8, 0.6], False),
        ([1.0] * 6, True),
    ],
)
def test_a_draft_is_computed_while_it_is_expected_to_save_more_than_it_takes(
    chances: list[float], goes_on: bool
) -> None:
    assert rule().goes_on(chances) == goes_on


@pytest.mark.parametrize(
    ("chances", "free", "n_taken"),
    [
        ([], [], 0),
        ([], [0.06, 0.9], 2),
        ([], [0.04, 0.9], 0),  # what comes behind it can't save it
        ([0.5, 0.5], [0.5, 0.5, 0.5], 2),  # 0.125 and 0.0625 of a second for 0.05 each, then 0.03
        ([0.01], [1.0], 0),
        ([1.0], [1.0] * 9, 9),
    ],
)
def test_free_drafts_follow_while_they_are_worth_their_rows(
    chances: list[float], free: list[float], n_taken: int
) -> None:
    assert rule().following(chances, free) == n_taken


@pytest.mark.parametrize(
    ("free", "n_leading"),
    [
        ([], 0),
        ([0.9, 0.9, 0.9, 0.01], 3),  # saves 2.3 seconds, less rows; computed ones 0.3 each at first
        ([0.2], 0),  # computed drafts save more
        ([0.45], 1),  # 0.4 against 0.25 of one computed draft: the second is worth nothing
    ],
)
def test_free_drafts_lead_where_they_save_more_than_computed_ones(free: list[float], n_leading: int) -> None:
    assert rule().leading(free, 4) == n_leading


def test_without_a_draft_that_pays_free_ones_always_lead() -> None:
    assert rule(draft_s=10.0).leading([0.1], 4) == 1


def test_it_learns_from_what_comes_of_drafts() -> None:
    learned = rule()
    assert learned.goes_on([0.6])
    for _ in range(500):
        learned.gate.audit(0.5, False)
    assert not learned.goes_on([1.0])
    for _ in range(5000):
        learned.gate.audit(0.5, True)
    assert learned.goes_on([0.6]) and learned.gate.mean_chance > 0.8


def test_the_better_it_goes_the_more_is_asked_of_a_draft() -> None:
    busy = rule()
    for _ in range(200):
        busy.gate.settle(5, 5)
    assert busy.gate.seconds_per_token == pytest.approx((1 + 4 * ROW_S) / 5, rel=0.2)
    assert not busy.goes_on([0.8])
    for _ in range(200):
        busy.gate.spend(5.0)
        busy.gate.settle(5, 5)
    assert busy.goes_on([0.8])


def chain(how: ChainRule | None) -> DraftChain:
    return DraftChain(lambda logits, before: int(logits.argmax()), lambda token_id: token_id == END, how)


def test_a_chain_tells_the_gate_of_its_computed_drafts_and_knows_their_origins() -> None:
    how = rule(0.9)
    before_s = how.gate.seconds_per_token
    made = chain(how)
    assert made.choose(LOGITS, []) == 1 and made.goes_on()
    assert made.choose(LOGITS, [1]) == 1
    assert made.following([0.9, 0.9, 0.0]) == 2
    assert made.origins_of(4) == [SEQUENCE, SEQUENCE, NGRAM, NGRAM] and made.origins_of(1) == [SEQUENCE]
    confidence = pytest.approx(torch.softmax(LOGITS, 0)[1].item())
    assert made.asked == {0: [(1, confidence)], 1: [(1, confidence)]}
    assert how.gate.seconds_per_token > before_s


def test_no_draft_follows_an_end() -> None:
    for how in (None, rule(1.0)):
        made = chain(how)
        made.choose(torch.eye(10)[END], [])
        assert not made.goes_on() and made.following([1.0]) == 0


def test_without_a_rule_there_is_as_much_as_there_is_room_for() -> None:
    made = chain(None)
    assert made.leading([1.0], 3) == 0
    for _ in range(3):
        made.choose(LOGITS, [])
        assert made.goes_on()
    assert made.following([0.001] * 2) == 2
    assert made.asked == {} and made.origins_of(6) == [*[SEQUENCE] * 3, NGRAM, NGRAM, SEQUENCE]
