"""N-gram drafts against a search of the whole text, through every order of observing, asking, undoing and closing."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hetero_ee.speculation.sources.match_precision import MatchPrecision
from hetero_ee.speculation.sources.ngram_index import SEPARATOR, NgramIndex
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hetero_ee.speculation.sources.ngram import NgramLimits, NgramSource

LIMITS = NgramLimits(max_order=4, min_draft_order=2, max_matches=3, max_history_tokens=24)
TOKENS = st.lists(st.integers(0, 2), max_size=7)
SEQUENCES = st.integers(0, 1)
NO_STATES = torch.empty(0)


def never(logits: torch.Tensor, before: Sequence[int]) -> int:
    raise AssertionError("there are no logits to choose from")


class SlowNgrams:
    """The same answers by looking at every place of every text."""

    def __init__(self) -> None:
        self.generations: list[list[list[int]]] = [[], []]

    def texts(self, token_ids: list[int]) -> list[list[list[int]]]:
        return [[token_ids], *self.generations]

    def followers(self, texts: list[list[int]], suffix: list[int]) -> Iterator[tuple[list[int], int]]:
        """(text, place of the follower), newest first."""
        for text in reversed(texts):
            for place in range(len(text) - 1, len(suffix) - 1, -1):
                if text[place - len(suffix) : place] == suffix:
                    yield text, place

    def candidates(self, token_ids: list[int], k: int) -> list[int]:
        found: list[int] = []
        for order in range(min(LIMITS.max_order, len(token_ids)), 0, -1):
            for texts in self.texts(token_ids):
                places = list(self.followers(texts, token_ids[-order:]))[: LIMITS.max_matches]
                found += [text[place] for text, place in places]
        return list(dict.fromkeys(found))[:k]

    def propose(self, token_ids: list[int], n_tokens: int) -> list[int]:
        for order in range(min(LIMITS.max_order, len(token_ids)), LIMITS.min_draft_order - 1, -1):
            for texts in self.texts(token_ids):
                for text, place in self.followers(texts, token_ids[-order:]):
                    if text is not token_ids:
                        return text[place : place + n_tokens]
                    endless = list(text)
                    while len(endless) < place + n_tokens:
                        endless.append(endless[place + len(endless) - len(text)])
                    return endless[place : place + n_tokens]
        return []

    def close(self, token_ids: list[int]) -> None:
        capacity = LIMITS.max_history_tokens // 2
        kept = token_ids[-(capacity - 1) :]
        if kept:
            if sum(len(text) + 1 for text in self.generations[0]) + len(kept) + 1 > capacity:
                self.generations = [[], self.generations[0]]
            self.generations[0].append(kept)


class NgramMachine(RuleBasedStateMachine):
    """Beside the source, `verified` is what each sequence observed."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.slow = NgramSource(LIMITS), SlowNgrams()
        self.verified: dict[int, list[int]] = {}

    @rule(sequence=SEQUENCES, token_ids=TOKENS, again=st.integers(0, 2))
    def observe(self, sequence: int, token_ids: list[int], again: int) -> None:
        known = self.verified.setdefault(sequence, [])
        first = max(0, len(known) - again)
        self.source.observe(sequence, first, known[first:] + token_ids, NO_STATES)
        known += token_ids

    @rule(sequence=SEQUENCES, drafts=TOKENS, k=st.integers(0, 4))
    def ask_for_candidates(self, sequence: int, drafts: list[int], k: int) -> None:
        token_ids = self.verified.get(sequence, []) + drafts
        assert self.source.candidates(sequence, token_ids, k) == self.slow.candidates(token_ids, k)
        self.verified.setdefault(sequence, [])

    @rule(sequence=SEQUENCES, drafts=TOKENS, n_tokens=st.integers(0, 9))
    def ask_for_a_chain(self, sequence: int, drafts: list[int], n_tokens: int) -> None:
        token_ids = self.verified.get(sequence, []) + drafts
        assert self.source.propose(sequence, token_ids, n_tokens, never) == self.slow.propose(token_ids, n_tokens)
        self.verified.setdefault(sequence, [])

    @rule(sequence=SEQUENCES, n_dropped=st.integers(-3, 9))
    def truncate(self, sequence: int, n_dropped: int) -> None:
        length = max(0, len(self.verified.get(sequence, [])) - n_dropped)
        self.source.truncate(sequence, length)
        if sequence in self.verified:
            del self.verified[sequence][length:]

    @rule(sequence=SEQUENCES)
    def close(self, sequence: int) -> None:
        self.source.close(sequence)
        self.slow.close(self.verified.pop(sequence, []))

    @invariant()
    def memory_is_bounded(self) -> None:
        n_history = sum(len(text) + 1 for texts in self.slow.generations for text in texts)
        assert n_history <= LIMITS.max_history_tokens
        n_open = sum(map(len, self.verified.values()))
        assert n_open + n_history <= self.source.n_tokens <= n_open + n_history + 7 * len(self.verified)


NgramMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestNgrams = NgramMachine.TestCase


def test_rollback_leaves_the_index_as_it_was() -> None:
    index, fresh = NgramIndex(5), NgramIndex(5)
    text = [1, 2, 1, 2, 3, SEPARATOR, 1, 2, 1, 2, 1, 1, 1]
    for length in range(len(text)):
        index.extend(text[len(index) :])
        index.truncate(length)
        assert vars(index) == vars(fresh)
        fresh.append(text[length])


def test_undone_tokens_are_forgotten_verified_ones_too() -> None:
    source = NgramSource()
    source.observe(0, 0, [1, 2, 3, 1, 2, 4, 1, 2], NO_STATES)
    assert source.candidates(0, [1, 2, 3, 1, 2, 4, 1, 2], 4) == [4, 3]
    source.truncate(0, 5)
    assert source.candidates(0, [1, 2, 3, 1, 2], 4) == [3]
    source.observe(0, 5, [5, 1, 2], NO_STATES)
    assert source.candidates(0, [1, 2, 3, 1, 2, 5, 1, 2], 4) == [5, 3]


def test_longer_ngrams_win_and_then_newer_places() -> None:
    source = NgramSource()
    text = [5, 6, 7, 1, 6, 7, 2, 6, 7, 3, 9, 5, 6, 7]
    assert source.candidates(0, text, 4) == [1, 3, 2]
    assert source.propose(0, text, 3, never) == [1, 6, 7]


def test_a_repetition_goes_on_past_the_end() -> None:
    assert NgramSource().propose(0, [8, 1, 2, 3, 1, 2, 3], 7, never) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(("order", "expected"), [(1, [4, 5]), (2, [])])
def test_a_chain_follows_no_ngram_below_the_least_order(order: int, expected: list[int]) -> None:
    source = NgramSource(NgramLimits(min_draft_order=order))
    assert source.propose(0, [3, 4, 5, 3], 2, never) == expected
    assert source.candidates(0, [3, 4, 5, 3], 2) == [4]


def test_earlier_answers_help_only_where_asked_for() -> None:
    for n_history, expected in ((0, []), (100, [12, 13])):
        source = NgramSource(NgramLimits(max_history_tokens=n_history))
        source.observe(0, 0, [10, 11, 12, 13, 14], NO_STATES)
        source.close(0)
        assert source.propose(1, [7, 10, 11], 2, never) == expected
        assert source.n_tokens == 3 + (6 if n_history else 0)


def test_unverified_tokens_never_reach_the_history() -> None:
    source = NgramSource(NgramLimits(max_history_tokens=100))
    source.observe(0, 0, [1, 2], NO_STATES)
    source.candidates(0, [1, 2, 3], 4)
    source.close(0)
    assert source.candidates(1, [1, 2], 4) == []


def test_closing_frees_everything() -> None:
    source = NgramSource()
    source.observe(0, 0, list(range(1000)), NO_STATES)
    assert source.n_tokens == 1000
    source.close(0)
    source.close(0)
    source.truncate(0, 3)
    assert source.n_tokens == 0


def test_what_does_not_fit_together_is_refused() -> None:
    source = NgramSource()
    source.observe(0, 0, [1, 2, 3], NO_STATES)
    with pytest.raises(ValueError, match="of which 3 are verified"):
        source.candidates(0, [1, 2], 4)
    for limits in ({"min_draft_order": 6}, {"max_matches": 0}, {"max_history_tokens": -1}):
        with pytest.raises(ValueError):
            NgramLimits(**limits)


def test_a_forecast_is_as_sure_as_matches_of_its_length_were_right() -> None:
    source, other = NgramSource(), NgramSource()
    source.observe(0, 0, [1, 2, 3, 4, 5, 6] * 6, NO_STATES)
    draw = random.Random(1)
    text = [draw.randrange(3) for _ in range(300)]
    other.observe(0, 0, text, NO_STATES)
    chain, chances = source.forecast(0, [1, 2, 3, 4, 5, 6] * 6 + [1, 2], 7)
    assert chain == [3, 4, 5, 6, 1, 2, 3] and min(chances) > 0.85
    chain, chances = other.forecast(0, [*text, 0], 7)
    assert len(chain) == len(chances) == 7 and max(chances) < 0.6  # a coin of three sides
    assert source.forecast(0, [1, 2, 3, 4, 5, 6] * 6 + [9], 7) == ([], [])


def test_only_verified_tokens_are_learned_from() -> None:
    asked, unasked = NgramSource(), NgramSource()
    text = [1, 2, 3, 1, 2]
    for source in (asked, unasked):
        source.observe(0, 0, text, NO_STATES)
    for drafts in ([3, 1, 2], [7, 7, 7, 7]):
        asked.forecast(0, [*text, *drafts], 4)
    for source in (asked, unasked):
        source.observe(0, 5, [3, 1], NO_STATES)
    assert asked.forecast(0, [*text, 3, 1], 4) == unasked.forecast(0, [*text, 3, 1], 4)


def test_chances_start_with_the_length_and_follow_what_came_out() -> None:
    precision = MatchPrecision(3)
    assert 0 < precision.chance(1) < precision.chance(2) < precision.chance(3) == precision.chance(9) < 1
    for _ in range(400):
        precision.add(2, False)
        precision.add(3, True)
    assert precision.chance(2) < 0.05 and precision.chance(3) > 0.95
    for _ in range(1000):
        precision.add(2, True)
    assert precision.chance(2) > 0.8  # what was long ago counts less


def test_no_ngram_spans_tokens_that_were_never_observed() -> None:
    source = NgramSource()
    source.observe(0, 0, [1, 2, 3], NO_STATES)
    source.observe(0, 5, [2, 3, 4, 2, 3], NO_STATES)  # positions 3 and 4 are unknown
    text = [1, 2, 3, 8, 9, 2, 3, 4, 2, 3]
    assert source.propose(0, text, 3, never) == [4, 2, 3]
    source.truncate(0, 4)
    source.observe(0, 4, [9, 2], NO_STATES)
    assert source.propose(0, text[:6], 3, never) == []


@pytest.mark.parametrize("breaks_in", ["append", "truncate"])
def test_a_change_broken_off_anywhere_is_mended_by_the_next(breaks_in: str) -> None:
    """As Ctrl-C breaks it off, in front of each line alternately."""
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    for n_lines in range(1, 40):
        index = NgramIndex(3)
        index.extend(tokens)
        n_left = n_lines

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal n_left
            if frame.f_code.co_name != breaks_in:
                return None
            if event == "line":
                n_left -= 1
                if n_left == 0:
                    raise KeyboardInterrupt
            return trace

        change = partial(index.append, 3) if breaks_in == "append" else partial(index.truncate, 5)
        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt):
                change()
        finally:
            sys.settrace(None)
        index.truncate(4)
        index.extend([2, 7])
        fresh = NgramIndex(3)
        fresh.extend([*tokens[:4], 2, 7])
        assert index.token_ids == fresh.token_ids and index.keys == fresh.keys
        for order, key in enumerate(fresh.keys, 1):
            assert list(index.places(order, key, 9)) == list(fresh.places(order, key, 9))
        for order in (1, 2, 3):
            assert list(index.places(order, 1, 9)) == list(fresh.places(order, 1, 9))
