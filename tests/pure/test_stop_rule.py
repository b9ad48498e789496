"""Stop rules: which drafts are worth their time and their token, and how the marginal one learns it."""

import random

import pytest

from hetero_ee.speculation.stop_rule import BIN_EDGES, FixedThreshold, LearnedChances, MarginalRule

DRAFT_S = 0.2


def cheap_batches(n_tokens: int) -> float:
    """Seconds of later layers that are read once for all tokens."""
    return 1.0 + 0.02 * n_tokens


def costly_batches(n_tokens: int) -> float:
    """Seconds of later layers that gain nothing from a batch."""
    return float(n_tokens)


def exits() -> MarginalRule:
    """Of drafts that take time before the exit layer."""
    return MarginalRule(DRAFT_S, cheap_batches)


def sequences(mean_chance: float = 0.5) -> MarginalRule:
    """Of drafts from elsewhere, right as often as mean_chance, whatever their confidence. Full mode's token takes a
    second, another one in its pass 0.05."""
    rule = MarginalRule(0.0, lambda m: 1 + 0.05 * (m - 1))
    rule._chances = LearnedChances([mean_chance] * (len(BIN_EDGES) + 1))
    return rule


def learned(rule: MarginalRule, confidence: float, right_share: float, n_drafts: int) -> MarginalRule:
    draw = random.Random(0)
    for _ in range(n_drafts):
        rule.audit(confidence, draw.random() < right_share)
    return rule


def is_worth(rule: MarginalRule, *confidences: float) -> bool:
    return rule.is_worth([rule.chance(confidence) for confidence in confidences], rule.draft_s)


def test_a_fixed_threshold_learns_nothing() -> None:
    rule = FixedThreshold(0.5)
    rule.audit(0.9, False)
    rule.settle(4, 1, 4)
    rule.spend(99.0)
    assert [rule.is_worth([0.1, rule.chance(each)], 9.0) for each in (0.0, 0.49, 0.5, 1.0)] == [
        False,
        False,
        True,
        True,
    ]
    assert [rule.best_length(chances, 9.0)[0] for chances in ([], [0.4, 0.9], [0.9, 0.5, 0.4, 0.9])] == [0, 0, 2]


def test_a_draft_is_made_while_its_chance_is_worth_its_time() -> None:
    rule = exits()
    step_s, token_s = DRAFT_S + 0.02, DRAFT_S + 1.02
    assert rule.seconds_per_token == pytest.approx(token_s)  # full mode's, before the first step
    for confidence in (0.1, 0.3, 0.5, 0.65, 0.75, 0.92, 0.995):
        assert is_worth(rule, confidence) == (rule.chance(confidence) * token_s > step_s)
    assert is_worth(rule, 0.3) and not is_worth(rule, 0.1)
    assert not is_worth(MarginalRule(DRAFT_S, costly_batches), 0.97)  # saves nothing, costs its own draft


def test_a_draft_counts_only_after_right_ones() -> None:
    answers = [is_worth(exits(), *[0.65] * n) for n in range(1, 6)]
    assert answers == [True, True, True, False, False]  # 0.65^n x 1.22 against 0.22


def test_what_verification_finds_moves_the_chance() -> None:
    for confidence, share in ((0.95, 0.4), (0.1, 0.9), (0.75, 0.0)):
        rule = exits()
        others = {other: rule.chance(other) for other in (0.3, 0.5, 0.995)}
        learned(rule, confidence, share, 1500)
        assert rule.chance(confidence) == pytest.approx(share, abs=0.08)
        assert {other: rule.chance(other) for other in others} == others


def test_what_was_long_ago_is_forgotten() -> None:
    rule = learned(exits(), 0.92, 1.0, 3000)
    assert rule.chance(0.92) > 0.97
    assert learned(rule, 0.92, 0.2, 2000).chance(0.92) == pytest.approx(0.2, abs=0.08)


def test_the_confidence_is_believed_until_it_is_refuted() -> None:
    rule = exits()
    assert rule.chance(0.85) == pytest.approx(0.85)
    assert learned(rule, 0.85, 0.0, 4).chance(0.85) > 0.5
    assert learned(rule, 0.85, 0.0, 400).chance(0.85) < 0.05


def test_it_asks_more_of_a_draft_the_better_it_goes() -> None:
    rule = exits()
    assert is_worth(rule, 0.3)
    for _ in range(300):
        rule.settle(8, 8, 8)
    assert rule.seconds_per_token == pytest.approx((8 * DRAFT_S + cheap_batches(8)) / 8, rel=0.02)
    assert not is_worth(rule, 0.3) and is_worth(rule, 0.92)
    for _ in range(300):
        rule.settle(1, 1, 1)
    assert is_worth(rule, 0.3)
    for _ in range(300):
        rule.settle(8, 8, 8)
        rule.spend(9.0)
    assert is_worth(rule, 0.3)


def test_the_same_stream_gives_the_same_answers() -> None:
    def answers() -> list[bool]:
        draw, rule, said = random.Random(3), exits(), list[bool]()
        for _ in range(500):
            chances = list[float]()
            while len(chances) < 7:
                confidence = draw.random()
                chances.append(rule.chance(confidence))
                said.append(rule.is_worth(chances, DRAFT_S))
                rule.audit(confidence, draw.random() < confidence)
            rule.settle(8, draw.randint(1, 8), 8)
        return said

    first = answers()
    assert first == answers() and 0 < sum(first) < len(first)


@pytest.mark.parametrize("right_share", [0.05, 0.5, 0.95])
def test_it_comes_near_the_best_fixed_length(right_share: float) -> None:
    """Drafts of one confidence, so that the best is a number of tokens; the rule has to find it."""

    def seconds_per_token(n_tokens: int) -> float:
        return (n_tokens * DRAFT_S + cheap_batches(n_tokens)) / sum(right_share**j for j in range(n_tokens))

    draw, rule = random.Random(1), exits()
    seconds = tokens = 0.0
    for n_step in range(1500):
        n_verified = 1
        while n_verified < 8 and is_worth(rule, *[0.5] * n_verified):
            n_verified += 1
        n_tokens = 1
        for _ in range(min(n_verified, 7)):  # the draft that was not made is checked too
            was_right = draw.random() < right_share
            rule.audit(0.5, was_right)
            if not was_right or n_tokens == n_verified:
                break
            n_tokens += 1
        rule.settle(n_verified, n_tokens, n_verified)
        if n_step >= 500:
            seconds, tokens = seconds + n_verified * DRAFT_S + cheap_batches(n_verified), tokens + n_tokens
    assert seconds / tokens < 1.06 * min(seconds_per_token(n_verified) for n_verified in range(1, 9))


# Draft sequences, whose drafts take time before they are seen.


@pytest.mark.parametrize(
    ("chances", "is_another"),
    [
        ([], True),
        ([0.6], True),  # 0.6 x 0.5 of a token's second is more than a draft's 0.2 and its token's 0.05
        ([0.49], False),
        ([0.8, 0.8], True),
        ([0.8, 0.6], False),
        ([1.0] * 6, True),
    ],
)
def test_a_draft_is_computed_while_it_is_expected_to_save_more_than_it_takes(
    chances: list[float], is_another: bool
) -> None:
    rule = sequences()
    assert rule.is_worth([*chances, rule.mean_chance], DRAFT_S) == is_another


@pytest.mark.parametrize(
    ("chances", "draft_s", "n_best"),
    [
        ([], 0.0, 0),
        ([0.9, 0.9, 0.9, 0.01], 0.0, 3),
        ([0.04, 0.9], 0.0, 0),  # what comes after it can't save it
        ([0.06, 0.9], 0.0, 2),
        ([1.0] * 9, 0.0, 9),
        ([0.5] * 4, DRAFT_S, 1),  # 0.5 and 0.25 of a second for 0.25 each: the second saves nothing
        ([0.5] * 4, 0.4, 1),
        ([0.5] * 4, 0.5, 0),
    ],
)
def test_the_best_length_saves_most(chances: list[float], draft_s: float, n_best: int) -> None:
    n_found, saved_s = sequences().best_length(chances, draft_s)
    assert n_found == n_best and (saved_s > 0) == (n_best > 0)


def test_the_mean_chance_follows_what_comes_of_drafts() -> None:
    rule = learned(sequences(), 0.5, 0.0, 500)
    assert not rule.is_worth([1.0, rule.mean_chance], DRAFT_S)
    learned(rule, 0.5, 1.0, 5000)
    assert rule.is_worth([0.6, rule.mean_chance], DRAFT_S) and rule.mean_chance > 0.8


def test_tokens_of_other_texts_in_the_pass_make_a_draft_dearer() -> None:
    """Up to 8 tokens cost next to nothing, more of them a tenth of a pass each."""
    rule = MarginalRule(0.0, lambda m: 1 + 0.1 * max(0, m - 8))
    assert rule.is_worth([0.05], 0.0) and rule.best_length([0.05] * 4, 0.0)[0] == 4
    rule.n_beside = 8
    assert not rule.is_worth([0.05], 0.0) and rule.is_worth([0.2], 0.0)
    assert rule.best_length([0.4] * 4, 0.0)[0] == 2


def test_texts_share_the_time_of_their_pass() -> None:
    rule = MarginalRule(0.0, lambda m: 1.0)
    for _ in range(600):
        rule.settle(2, 2, 8)  # a fourth of a second for two tokens
    assert rule.seconds_per_token == pytest.approx(0.125, rel=0.01)
