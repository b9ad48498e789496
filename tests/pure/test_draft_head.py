"""DraftHeadSource on the reference layer: what it proposes, what it forgets, and what it does with broken numbers."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_ee.speculation.exits.candidates import ABSENT
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import DraftHead
from hetero_ee.speculation.sources.draft_head_opening import draft_head_layer
from hetero_ee.weights.weight import DenseWeight
from tests.draft_heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NAMES,
    VOCAB,
    BareTarget,
    head_weights,
    part_of,
    random_text,
)

N_TOKENS, MAX_TOKENS = 12, 40
TOKENS, STATES = random_text(N_TOKENS)


def greedy(logits: Tensor, history: Sequence[int]) -> int:
    return int(logits.argmax())


def fresh(**changes: Any) -> DraftHeadSource:
    max_tokens, lm_head = changes.pop("max_tokens", MAX_TOKENS), changes.pop("lm_head", None)
    layer = draft_head_layer(head_weights(), max_tokens, lm_head=lm_head)
    return DraftHeadSource(layer, BareTarget(), **changes)


def observed(n_tokens: int, sequence: int = 0) -> DraftHeadSource:
    source = fresh()
    source.observe(sequence, 0, TOKENS[:n_tokens], STATES[:n_tokens])
    return source


def guesses(head: DraftHead, tokens: Sequence[int], states: Tensor) -> Tensor:
    """The head written down once more, whole texts at once: (n, hidden) of tokens 1..n and states 0..n-1."""
    weights: Any = SimpleNamespace(**{short: part_of(head, short) for short in NAMES})
    embedded = BareTarget().embedding[list(tokens)]
    x = F.linear(torch.cat([embedded, states], -1), weights.fc, weights.fc_bias)
    qkv = F.linear(x, weights.qkv).view(len(tokens), -1, HEAD_DIM).transpose(0, 1)
    queries, keys, values = qkv[:HEADS], qkv[HEADS : HEADS + KV_HEADS], qkv[HEADS + KV_HEADS :]
    angles = torch.arange(len(tokens))[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turned = []
    for part in (queries, keys):
        numbers = torch.complex(*part.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        turned.append(torch.cat([numbers.real, numbers.imag], -1))
    mixed = F.scaled_dot_product_attention(
        turned[0][None], turned[1][None], values[None], is_causal=True, enable_gqa=True
    )
    x = x + F.linear(mixed[0].transpose(0, 1).flatten(1), weights.output)
    normed = F.rms_norm(x, (HIDDEN,), weights.norm, 1e-5)
    gate, up = F.linear(normed, weights.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, weights.down)


def test_a_chain_follows_the_verified_states_and_then_its_own_guesses() -> None:
    target, newest = BareTarget(), 7
    tokens, states, expected = [*TOKENS[1:], newest], STATES, list[int]()
    for _ in range(4):
        state = guesses(head_weights(), tokens, states)[-1:]
        expected.append(int((state @ target.head.T).argmax()))
        tokens, states = [*tokens, expected[-1]], torch.cat([states, state])
    assert observed(N_TOKENS).propose(0, [*TOKENS, newest], 4, greedy) == expected


def test_the_choice_is_the_callers_and_sees_every_token_before() -> None:
    seen = []

    def choose(logits: Tensor, history: Sequence[int]) -> int:
        assert logits.shape == (VOCAB,)
        seen.append(list(history))
        return 11 + len(seen)

    assert observed(3).propose(0, TOKENS[:4], 3, choose) == [12, 13, 14]
    assert seen == [TOKENS[:4], [*TOKENS[:4], 12], [*TOKENS[:4], 12, 13]]


def test_candidates_are_the_likeliest_tokens_and_the_chains_first_comes_first() -> None:
    source = observed(5)
    found = source.candidates(0, TOKENS[:6], 4)
    assert len(set(found)) == 4 and source.propose(0, TOKENS[:6], 2, greedy)[0] == found[0]
    assert source.candidates(0, TOKENS[:6], 1000)[:4] == found


def test_candidates_behind_drafts_are_those_of_the_chain() -> None:
    source = observed(5)
    chain = source.propose(0, TOKENS[:6], 3, greedy)
    assert source.candidates(0, [*TOKENS[:6], *chain[:2]], 2)[0] == chain[2]
    assert source.propose(0, [*TOKENS[:6], chain[0]], 2, greedy) == chain[1:]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("pqctrwo"), st.integers(1, 5)), max_size=12), st.integers(0, 1))
def test_whatever_happened_before_a_fresh_source_proposes_the_same(steps: list[tuple[str, int]], other: int) -> None:
    source, length = fresh(), 0
    for step, number in steps:
        end = min(N_TOKENS - 1, length + number)
        if step == "p":
            source.propose(0, TOKENS[: length + 1], number, greedy)
        elif step == "q":  # the newest token turns out to be another
            source.propose(0, [*TOKENS[:length], number], number, greedy)
        elif step == "c":
            source.candidates(0, [*TOKENS[: length + 1], number], number)
        elif step == "t":
            length = max(0, length - number)
            source.truncate(0, length)
        elif step == "r":  # replaces rows that it holds
            first = max(0, length - number)
            source.observe(0, first, TOKENS[first:length], STATES[first:length])
        elif step == "w":  # rows that are rolled back
            source.observe(0, length, TOKENS[length:end], -STATES[length:end])
            source.propose(0, TOKENS[: end + 1], number, greedy)
            source.truncate(0, length)
        else:
            source.observe(0, length, TOKENS[length:end], STATES[length:end])
            length = end
        source.observe(1, length, [3] * other, STATES[:other])  # another text beside it
    asked = TOKENS[: length + 1]
    assert source.propose(0, asked, 4, greedy) == observed(length).propose(0, asked, 4, greedy)
    assert source.candidates(0, asked, 4) == observed(length).candidates(0, asked, 4)


def test_a_question_leaves_nothing_behind() -> None:
    """Not in the cache of its own head either, whose bits the next question would show."""
    logits: list[list[Tensor]] = [[], []]
    for number, source in enumerate((observed(5), observed(5))):
        if number:
            source.propose(0, TOKENS[:6], 4, greedy)
            source.candidates(0, [*TOKENS[:6], 3, 4], 2)
            source.observe(0, 5, TOKENS[5:8], -STATES[5:8])
            source.propose(0, TOKENS[:9], 4, greedy)
            source.truncate(0, 5)
        source.observe(0, 5, TOKENS[5:8], STATES[5:8])
        source.propose(0, TOKENS[:9], 4, lambda found, history, n=number: logits[n].append(found) or greedy(found, []))
    assert all(map(torch.equal, *logits)) and len(logits[0]) == 4


def test_sequences_do_not_see_each_other_and_a_closed_one_is_forgotten() -> None:
    source = fresh()
    other, states = random_text(N_TOKENS, seed=9)
    for first in range(0, N_TOKENS, 4):
        source.observe(5, first, TOKENS[first : first + 4], STATES[first : first + 4])
        source.observe(6, first, other[first : first + 4], states[first : first + 4])
    assert source.propose(5, [*TOKENS, 4], 3, greedy) == observed(N_TOKENS).propose(0, [*TOKENS, 4], 3, greedy)
    source.close(5)
    source.close(5)
    assert source.propose(5, [*TOKENS, 4], 3, greedy) == []
    assert source.propose(6, [*other, 4], 3, greedy) != []


def test_it_proposes_nothing_about_what_it_has_not_seen() -> None:
    source = observed(4)
    assert source.propose(0, TOKENS[:4], 3, greedy) == []  # the newest is verified already: its state leads further
    assert source.propose(0, TOKENS[:5], 0, greedy) == []
    assert source.candidates(0, TOKENS[:5], 0) == []
    assert source.propose(9, TOKENS[:5], 3, greedy) == []
    source.truncate(9, 0)


def test_behind_a_gap_it_starts_anew() -> None:
    source = observed(3)
    source.observe(0, 6, TOKENS[6:9], STATES[6:9])
    late = fresh()
    late.observe(0, 6, TOKENS[6:9], STATES[6:9])
    asked = TOKENS[:10]
    assert source.propose(0, asked, 3, greedy) == late.propose(0, asked, 3, greedy) != []


def test_a_chain_ends_with_the_room_for_it() -> None:
    source = fresh(max_tokens=6)
    source.observe(0, 0, TOKENS[:4], STATES[:4])
    assert len(source.propose(0, TOKENS[:5], 8, greedy)) == 3  # rows 4 and 5, and what row 3 guesses


@pytest.mark.parametrize("n_wanted", [1, 2, 5])
def test_no_draft_is_computed_that_the_judge_does_not_want(n_wanted: int) -> None:
    chosen = list[int]()

    class Judge:
        def goes_on(self) -> bool:
            return len(chosen) < n_wanted

    def choose(logits: Tensor, history: Sequence[int]) -> int:
        chosen.append(greedy(logits, history))
        return chosen[-1]

    asked = [*TOKENS[:6], 4]
    source = observed(6)
    chain = source.propose(0, asked, 5, choose, Judge())  # type: ignore[arg-type]
    assert chain == chosen == observed(6).propose(0, asked, 5, greedy)[:n_wanted]
    assert source.propose(0, asked, 5, greedy)[:n_wanted] == chain


def test_a_trimmed_vocabulary_drafts_its_tokens_alone() -> None:
    ids = torch.tensor([2, 5, 17, 40, 60])
    source = fresh(lm_head=DenseWeight(BareTarget().head[ids]), draft_token_ids=ids)
    source.observe(0, 0, TOKENS, STATES)
    found = source.candidates(0, [*TOKENS, 4], 9)
    assert sorted(found) == ids.tolist()
    seen: list[Tensor] = []
    source.propose(0, [*TOKENS, 4], 1, lambda logits, history: int(seen.append(logits) or 2))
    whole = observed(N_TOKENS)
    whole.propose(0, [*TOKENS, 4], 1, lambda logits, history: int(seen.append(logits) or 2))
    assert torch.equal(seen[0][ids], seen[1][ids]) and (seen[0] == ABSENT).sum() == VOCAB - len(ids)
    assert torch.isfinite(seen[0]).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_states_that_are_no_numbers_end_drafting_until_they_are_gone(broken: float) -> None:
    notices: list[str] = []
    source = fresh(warn=notices.append)
    states = STATES.clone()
    states[4, 3] = broken
    source.observe(0, 0, TOKENS[:6], states[:6])
    for _ in range(2):
        assert source.propose(0, TOKENS[:7], 3, greedy) == []
        assert source.candidates(0, TOKENS[:7], 3) == []
    assert len(notices) == 1 and "no numbers" in notices[0]
    source.truncate(0, 4)
    source.observe(0, 4, TOKENS[4:6], STATES[4:6])
    assert source.propose(0, TOKENS[:7], 3, greedy) == observed(6).propose(0, TOKENS[:7], 3, greedy) != []


@pytest.mark.parametrize("part", ["fc", "qkv", "output", "gate_up", "down", "norm", "fc_bias"])
def test_weights_that_are_no_numbers_draft_nothing(part: str) -> None:
    notices: list[str] = []
    values = part_of(head_weights(), part)
    assert values is not None
    values = values.clone()
    values.view(-1)[0] = math.nan
    layer = draft_head_layer(head_weights(**{part: values}), MAX_TOKENS)
    source = DraftHeadSource(layer, BareTarget(), warn=notices.append)
    source.observe(0, 0, TOKENS, STATES)
    assert source.propose(0, [*TOKENS, 4], 3, greedy) == []
    assert source.candidates(0, [*TOKENS, 4], 3) == [] and len(notices) == 1


def test_logits_that_are_no_numbers_draft_nothing() -> None:
    target, notices = BareTarget(), list[str]()
    target.head[5, 5] = math.nan
    source = DraftHeadSource(draft_head_layer(head_weights(), MAX_TOKENS), target, warn=notices.append)
    source.observe(0, 0, TOKENS, STATES)
    assert source.propose(0, [*TOKENS, 4], 3, greedy) == [] and len(notices) == 1
