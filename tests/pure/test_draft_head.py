"""DraftHeadSource on the reference layer: what it drafts, what it forgets, and what it does with broken numbers."""

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

from hetero_ee.kv.batch import Batch
from hetero_ee.speculation.drafts import ABSENT
from hetero_ee.speculation.sources.draft_head import DraftHeadSource
from hetero_ee.speculation.sources.draft_head_layer import DraftHead
from tests.draft_heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NAMES,
    VOCAB,
    BareTarget,
    draft_head_layer,
    head_source,
    head_weights,
    part_of,
    random_text,
)
from tests.draft_sources import greedy, taken, taken_ids

N_TOKENS, MAX_TOKENS = 12, 40
TOKENS, STATES = random_text(N_TOKENS)


def fresh(**changes: Any) -> DraftHeadSource:
    layer = draft_head_layer(head_weights(), changes.pop("max_tokens", MAX_TOKENS))
    return head_source(layer, BareTarget(), **changes)


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


def test_drafts_follow_the_verified_states_and_then_their_own_guesses() -> None:
    target, newest = BareTarget(), 7
    tokens, states, expected = [*TOKENS[1:], newest], STATES, list[int]()
    for _ in range(4):
        state = guesses(head_weights(), tokens, states)[-1:]
        expected.append(int((state @ target.head.T).argmax()))
        tokens, states = [*tokens, expected[-1]], torch.cat([states, state])
    assert taken_ids(observed(N_TOKENS), [*TOKENS, newest], 4) == expected


def test_the_choice_is_the_callers_and_sees_every_token_before() -> None:
    seen = []

    def choose(logits: Tensor, history: Sequence[int]) -> int:
        assert logits.shape == (VOCAB,)
        seen.append(list(history))
        return 11 + len(seen)

    assert taken_ids(observed(3), TOKENS[:4], 3, choose) == [12, 13, 14]
    assert seen == [TOKENS[:4], [*TOKENS[:4], 12], [*TOKENS[:4], 12, 13]]


def test_after_drafts_it_drafts_what_its_own_sequence_goes_on_with() -> None:
    source = observed(5)
    drafts = taken(source, TOKENS[:6], 3)
    assert taken(source, [*TOKENS[:6], drafts[0].token_id], 2) == drafts[1:]


def test_a_drafts_confidence_is_its_probability() -> None:
    seen: list[Tensor] = []
    (draft,) = taken(observed(5), TOKENS[:6], 1, lambda logits, history: int(seen.append(logits) or 7))
    assert draft == (7, pytest.approx(float(torch.softmax(seen[0], 0)[7])))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("pqctrwom"), st.integers(1, 5)), max_size=12), st.integers(0, 1))
def test_whatever_happened_before_a_fresh_source_drafts_the_same(steps: list[tuple[str, int]], other: int) -> None:
    source, length = fresh(), 0
    for step, number in steps:
        end = min(N_TOKENS - 1, length + number)
        if step == "p":
            taken_ids(source, TOKENS[: length + 1], number)
        elif step == "q":  # the newest token turns out to be another
            taken_ids(source, [*TOKENS[:length], number], number)
        elif step == "c":  # drafts that are not verified yet
            taken_ids(source, [*TOKENS[: length + 1], number], number)
        elif step == "t":
            length = max(0, length - number)
            source.truncate(0, length)
        elif step == "r":  # replaces positions that it holds
            first = max(0, length - number)
            source.observe(0, first, TOKENS[first:length], STATES[first:length])
        elif step == "w":  # positions that are rolled back
            source.observe(0, length, TOKENS[length:end], -STATES[length:end])
            taken_ids(source, TOKENS[: end + 1], number)
            source.truncate(0, length)
        else:
            tell = source.read_prompt if step == "m" else source.observe
            tell(0, length, TOKENS[length:end], STATES[length:end])
            length = end
        source.observe(1, length, [3] * other, STATES[:other])  # another text beside it
    asked = TOKENS[: length + 1]
    assert taken_ids(source, asked, 4) == taken_ids(observed(length), asked, 4)


@pytest.mark.parametrize("chunk", [1, 5, N_TOKENS])
def test_what_it_read_of_a_prompt_is_not_computed_by_the_first_draft(chunk: int) -> None:
    source, counted = fresh(), list[int]()
    layer: Any = source._layer_now()
    guess = layer.guess

    def counting(embedded: Tensor, states: Tensor, batch: Batch) -> Tensor:
        counted.append(len(batch))
        return guess(embedded, states, batch)

    layer.guess = counting
    for first in range(0, N_TOKENS, chunk):
        source.read_prompt(0, first, TOKENS[first : first + chunk], STATES[first : first + chunk])
    assert sum(counted) == N_TOKENS - 1  # the last one's next token is not there yet
    counted.clear()
    drafts = taken_ids(source, [*TOKENS, 4], 1)
    assert counted == [1] and drafts == taken_ids(observed(N_TOKENS), [*TOKENS, 4], 1)
    source.truncate(0, 8)  # a chat's next turn, that begins alike
    counted.clear()
    source.read_prompt(0, 8, [1, 2], STATES[8:10])
    assert sum(counted) == 2


def test_a_question_leaves_nothing_behind() -> None:
    """Not in the cache of its own head either, whose bits the next question would show."""
    logits: list[list[Tensor]] = [[], []]
    for number, source in enumerate((observed(5), observed(5))):
        if number:
            taken_ids(source, TOKENS[:6], 4)
            taken_ids(source, [*TOKENS[:6], 3, 4], 2)
            source.observe(0, 5, TOKENS[5:8], -STATES[5:8])
            taken_ids(source, TOKENS[:9], 4)
            source.truncate(0, 5)
        source.observe(0, 5, TOKENS[5:8], STATES[5:8])
        taken(source, TOKENS[:9], 4, lambda found, history, n=number: logits[n].append(found) or greedy(found, []))
    assert all(map(torch.equal, *logits)) and len(logits[0]) == 4


def test_sequences_do_not_see_each_other_and_a_closed_one_is_forgotten() -> None:
    source = fresh()
    other, states = random_text(N_TOKENS, seed=9)
    for first in range(0, N_TOKENS, 4):
        source.observe(5, first, TOKENS[first : first + 4], STATES[first : first + 4])
        source.observe(6, first, other[first : first + 4], states[first : first + 4])
    assert taken_ids(source, [*TOKENS, 4], 3, sequence=5) == taken_ids(observed(N_TOKENS), [*TOKENS, 4], 3)
    source.close(5)
    source.close(5)
    assert taken_ids(source, [*TOKENS, 4], 3, sequence=5) == []
    assert taken_ids(source, [*other, 4], 3, sequence=6) != []


def test_it_drafts_nothing_about_what_it_has_not_seen() -> None:
    source = observed(4)
    assert taken_ids(source, TOKENS[:4], 3) == []  # the newest is verified already: its state leads further
    assert taken_ids(source, TOKENS[:5], 0) == []
    assert taken_ids(source, TOKENS[:5], 3, sequence=9) == []
    source.truncate(9, 0)


def test_after_a_gap_it_starts_again() -> None:
    source = observed(3)
    source.observe(0, 6, TOKENS[6:9], STATES[6:9])
    late = fresh()
    late.observe(0, 6, TOKENS[6:9], STATES[6:9])
    asked = TOKENS[:10]
    assert taken_ids(source, asked, 3) == taken_ids(late, asked, 3) != []


def test_drafts_end_with_the_room_for_them() -> None:
    source = fresh(max_tokens=6)
    source.observe(0, 0, TOKENS[:4], STATES[:4])
    assert len(taken_ids(source, TOKENS[:5], 8)) == 3  # positions 4 and 5, and what position 3 guesses


@pytest.mark.parametrize("n_wanted", [1, 2, 5])
def test_no_draft_is_computed_before_it_is_asked_for(n_wanted: int) -> None:
    chosen = list[int]()

    def choose(logits: Tensor, history: Sequence[int]) -> int:
        chosen.append(greedy(logits, history))
        return chosen[-1]

    asked, source = [*TOKENS[:6], 4], observed(6)
    drafts = taken_ids(source, asked, n_wanted, choose)
    assert drafts == chosen == taken_ids(observed(6), asked, 5)[:n_wanted]
    assert taken_ids(source, asked, 5)[:n_wanted] == drafts
    assert taken_ids(source, asked, 5, lambda logits, history: None) == []  # whose sampling takes none


def test_a_trimmed_vocabulary_drafts_its_tokens_alone() -> None:
    ids = torch.tensor([2, 5, 17, 40, 60])
    source = fresh(draft_token_ids=ids)
    source.observe(0, 0, TOKENS, STATES)
    seen: list[Tensor] = []
    for each in (source, observed(N_TOKENS)):
        taken(each, [*TOKENS, 4], 1, lambda logits, history: int(seen.append(logits) or 2))
    assert torch.equal(seen[0][ids], seen[1][ids]) and (seen[0] == ABSENT).sum() == VOCAB - len(ids)
    assert torch.isfinite(seen[0]).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_states_that_are_not_finite_end_drafting_until_they_are_gone(broken: float) -> None:
    warnings: list[str] = []
    source = fresh(warn=warnings.append)
    states = STATES.clone()
    states[4, 3] = broken
    source.observe(0, 0, TOKENS[:6], states[:6])
    for _ in range(2):
        assert taken_ids(source, TOKENS[:7], 3) == []
    assert len(warnings) == 1 and "not finite" in warnings[0]
    source.truncate(0, 4)
    source.observe(0, 4, TOKENS[4:6], STATES[4:6])
    assert taken_ids(source, TOKENS[:7], 3) == taken_ids(observed(6), TOKENS[:7], 3) != []


@pytest.mark.parametrize("part", ["fc", "qkv", "output", "gate_up", "down", "norm", "fc_bias"])
def test_weights_that_are_not_finite_draft_nothing(part: str) -> None:
    warnings: list[str] = []
    values = part_of(head_weights(), part)
    assert values is not None
    values = values.clone()
    values.view(-1)[0] = math.nan
    layer = draft_head_layer(head_weights(**{part: values}), MAX_TOKENS)
    source = head_source(layer, BareTarget(), warn=warnings.append)
    source.observe(0, 0, TOKENS, STATES)
    assert taken(source, [*TOKENS, 4], 3) == [] and len(warnings) == 1


def test_logits_that_are_not_finite_draft_nothing() -> None:
    target, warnings = BareTarget(), list[str]()
    target.head[5, 5] = math.nan
    source = head_source(draft_head_layer(head_weights(), MAX_TOKENS), target, warn=warnings.append)
    source.observe(0, 0, TOKENS, STATES)
    assert taken_ids(source, [*TOKENS, 4], 3) == [] and len(warnings) == 1
