"""Gates: which drafts are worth a row, and how the adaptive one learns it."""

import random

import pytest
from hetero_ee.speculation.draft_gate import AdaptiveGate, FixedGate

DRAFT_S = 0.2


def cheap_batches(n_rows: int) -> float:
    """Seconds of later layers that are read once for all rows."""
    return 1.0 + 0.02 * n_rows


def dear_batches(n_rows: int) -> float:
    """Seconds of later layers that gain nothing from a batch."""
    return float(n_rows)


def learned(gate: AdaptiveGate, confidence: float, right_share: float, n_drafts: int, seed: int = 0) -> AdaptiveGate:
    draw = random.Random(seed)
    for _ in range(n_drafts):
        gate.audit(confidence, draw.random() < right_share)
    return gate


def test_a_fixed_gate_has_one_threshold() -> None:
    gate = FixedGate(0.5)
    gate.audit(0.9, False)
    gate.settle(4, 1)
    assert [gate.goes_on(0, confidence, 1) for confidence in (0.0, 0.49, 0.5, 1.0)] == [False, False, True, True]


def test_a_draft_is_made_while_its_chance_is_worth_its_row() -> None:
    gate = AdaptiveGate(DRAFT_S, cheap_batches)
    row_s, token_s = DRAFT_S + 0.02, DRAFT_S + 1.02
    assert gate.seconds_per_token == pytest.approx(token_s)  # full mode's, before the first round
    for confidence in (0.1, 0.3, 0.5, 0.65, 0.75, 0.92, 0.995):
        assert gate.goes_on(0, confidence, 1) == (gate.chance(confidence) * token_s > row_s)
    assert gate.goes_on(0, 0.3, 1) and not gate.goes_on(0, 0.1, 1)
    assert not AdaptiveGate(DRAFT_S, dear_batches).goes_on(0, 0.97, 1)  # saves nothing, costs its own draft


def test_a_draft_counts_only_behind_right_ones() -> None:
    gate = AdaptiveGate(DRAFT_S, cheap_batches)
    answers = [gate.goes_on(0, 0.65, n_pending) for n_pending in range(1, 6)]
    assert answers == [True, True, True, False, False]  # 0.65^n x 1.22 against 0.22
    assert gate.goes_on(0, 0.65, 1)  # the next round begins again
    assert gate.goes_on(1, 0.65, 2) and gate.goes_on(0, 0.65, 2)  # sequences know nothing of each other


def test_a_draft_that_was_refused_leaves_no_trace() -> None:
    asked_twice, asked_once = (AdaptiveGate(DRAFT_S, cheap_batches) for _ in range(2))
    for gate in (asked_twice, asked_once):
        gate.goes_on(0, 0.92, 1)
    assert not asked_twice.goes_on(0, 0.1, 2)
    for confidence in (0.92, 0.65, 0.5):
        assert asked_twice.goes_on(0, confidence, 2) == asked_once.goes_on(0, confidence, 2)


def test_what_verification_finds_moves_the_chance() -> None:
    for confidence, share in ((0.95, 0.4), (0.1, 0.9), (0.75, 0.0)):
        gate = AdaptiveGate(DRAFT_S, cheap_batches)
        others = {other: gate.chance(other) for other in (0.3, 0.5, 0.995)}
        learned(gate, confidence, share, 1500)
        assert gate.chance(confidence) == pytest.approx(share, abs=0.08)
        assert {other: gate.chance(other) for other in others} == others


def test_what_was_long_ago_is_forgotten() -> None:
    gate = learned(AdaptiveGate(DRAFT_S, cheap_batches), 0.92, 1.0, 3000)
    assert gate.chance(0.92) > 0.97
    assert learned(gate, 0.92, 0.2, 2000).chance(0.92) == pytest.approx(0.2, abs=0.08)


def test_calibration_is_believed_until_it_is_refuted() -> None:
    gate = AdaptiveGate(DRAFT_S, cheap_batches, lambda confidence: confidence / 2)
    assert gate.chance(0.85) == pytest.approx(0.425)
    assert learned(gate, 0.85, 1.0, 4).chance(0.85) < 0.7
    assert learned(gate, 0.85, 1.0, 400).chance(0.85) > 0.9
    assert AdaptiveGate(DRAFT_S, cheap_batches, lambda confidence: 7.0).chance(0.1) == 1.0


def test_it_asks_more_of_a_draft_the_better_it_goes() -> None:
    gate = AdaptiveGate(DRAFT_S, cheap_batches)
    assert gate.goes_on(0, 0.3, 1)
    for _ in range(300):
        gate.settle(8, 8)
    assert gate.seconds_per_token == pytest.approx((8 * DRAFT_S + cheap_batches(8)) / 8, rel=0.02)
    assert not gate.goes_on(0, 0.3, 1) and gate.goes_on(0, 0.92, 1)
    for _ in range(300):
        gate.settle(1, 1)
    assert gate.goes_on(0, 0.3, 1)


def test_the_same_stream_gives_the_same_answers() -> None:
    def answers() -> list[bool]:
        draw, gate, said = random.Random(3), AdaptiveGate(DRAFT_S, cheap_batches), list[bool]()
        for _ in range(500):
            n_pending = 1
            while n_pending < 8:
                confidence = draw.random()
                said.append(gate.goes_on(draw.randrange(2), confidence, n_pending))
                gate.audit(confidence, draw.random() < confidence)
                n_pending += 1
            gate.settle(n_pending, draw.randint(1, n_pending))
        return said

    first = answers()
    assert first == answers() and 0 < sum(first) < len(first)


@pytest.mark.parametrize("right_share", [0.05, 0.5, 0.95])
def test_it_comes_near_the_best_fixed_length(right_share: float) -> None:
    """Drafts of one confidence, so that the best is a number of rows; the gate has to find it."""

    def seconds_per_token(n_rows: int) -> float:
        return (n_rows * DRAFT_S + cheap_batches(n_rows)) / sum(right_share**j for j in range(n_rows))

    draw, gate = random.Random(1), AdaptiveGate(DRAFT_S, cheap_batches)
    seconds = tokens = 0.0
    for n_round in range(1500):
        n_rows = 1
        while n_rows < 8 and gate.goes_on(0, 0.5, n_rows):
            n_rows += 1
        n_tokens = 1
        for _ in range(min(n_rows, 7)):  # the draft that was refused is checked too
            was_right = draw.random() < right_share
            gate.audit(0.5, was_right)
            if not was_right or n_tokens == n_rows:
                break
            n_tokens += 1
        gate.settle(n_rows, n_tokens)
        if n_round >= 500:
            seconds, tokens = seconds + n_rows * DRAFT_S + cheap_batches(n_rows), tokens + n_tokens
    assert seconds / tokens < 1.06 * min(seconds_per_token(n_rows) for n_rows in range(1, 9))
