"""N-gram drafts against a search of the whole text, through every order of observing, asking, undoing and closing."""

import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hetero_ee.speculation.sources.ngram import MAX_ORDER, MatchPrecision, NgramSource, _Text
from tests.draft_sources import taken

TOKENS = st.lists(st.integers(0, 2), max_size=7)
SEQUENCES = st.integers(0, 1)
NO_STATES = torch.empty(0)


def never(logits: torch.Tensor, before: Sequence[int]) -> int:
    raise AssertionError("there are no logits to choose from")


def drafted(source: NgramSource, token_ids: list[int], n: int, sequence: int = 0) -> tuple[list[int], list[float]]:
    """Up to n drafts and their chances."""
    found = taken(source, token_ids, n, never, sequence)
    return [draft.token_id for draft in found], [draft.confidence for draft in found]


def observed(text: list[int]) -> NgramSource:
    source = NgramSource()
    source.observe(0, 0, text, NO_STATES)
    return source


def searched(token_ids: list[int], n: int) -> list[int]:
    """The same drafts by looking at every position: what followed the longest last n-gram where it stood last."""
    for order in range(min(MAX_ORDER, len(token_ids)), 0, -1):
        for position in range(len(token_ids) - 1, order - 1, -1):
            if token_ids[position - order : position] == token_ids[-order:]:
                endless = list(token_ids)
                while len(endless) < position + n:
                    endless.append(endless[position + len(endless) - len(token_ids)])
                return endless[position : position + n]
    return []


class NgramMachine(RuleBasedStateMachine):
    """Beside the source, `verified` is what each sequence observed."""

    def __init__(self) -> None:
        super().__init__()
        self.source = NgramSource()
        self.verified: dict[int, list[int]] = {}

    @rule(sequence=SEQUENCES, token_ids=TOKENS, again=st.integers(0, 2))
    def observe(self, sequence: int, token_ids: list[int], again: int) -> None:
        known = self.verified.setdefault(sequence, [])
        first = max(0, len(known) - again)
        self.source.observe(sequence, first, known[first:] + token_ids, NO_STATES)
        known += token_ids

    @rule(sequence=SEQUENCES, drafts=TOKENS, n=st.integers(0, 9))
    def ask(self, sequence: int, drafts: list[int], n: int) -> None:
        token_ids = self.verified.setdefault(sequence, []) + drafts
        assert drafted(self.source, token_ids, n, sequence)[0] == searched(token_ids, n)

    @rule(sequence=SEQUENCES, n_dropped=st.integers(-3, 9))
    def truncate(self, sequence: int, n_dropped: int) -> None:
        length = max(0, len(self.verified.get(sequence, [])) - n_dropped)
        self.source.truncate(sequence, length)
        if sequence in self.verified:
            del self.verified[sequence][length:]

    @rule(sequence=SEQUENCES)
    def close(self, sequence: int) -> None:
        self.source.close(sequence)
        self.source.close(sequence)
        self.verified.pop(sequence, None)
        assert sequence not in self.source._texts


NgramMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestNgrams = NgramMachine.TestCase


def test_rollback_leaves_the_index_as_it_was() -> None:
    text, fresh = _Text(), _Text()
    token_ids = [1, 2, 1, 2, 3, 9, 1, 2, 1, 2, 1, 1, 1]
    for length in range(len(token_ids)):
        text.become(token_ids)
        text.truncate(length)
        assert vars(text) == vars(fresh)
        fresh.append(token_ids[length])


def test_undone_tokens_are_forgotten_verified_ones_too() -> None:
    source = observed([1, 2, 3, 1, 2, 4, 1, 2])
    assert drafted(source, [1, 2, 3, 1, 2, 4, 1, 2], 1)[0] == [4]
    source.truncate(0, 5)
    assert drafted(source, [1, 2, 3, 1, 2], 1)[0] == [3]
    source.observe(0, 5, [5, 1, 2], NO_STATES)
    assert drafted(source, [1, 2, 3, 1, 2, 5, 1, 2], 1)[0] == [5]


def test_longer_ngrams_win_and_then_newer_positions() -> None:
    assert drafted(NgramSource(), [5, 6, 7, 1, 6, 7, 2, 6, 7, 3, 9, 5, 6, 7], 3)[0] == [1, 6, 7]
    assert drafted(NgramSource(), [4, 6, 7, 1, 6, 7, 2, 6, 7], 1)[0] == [2]


def test_a_repetition_goes_on_past_the_end() -> None:
    assert drafted(NgramSource(), [8, 1, 2, 3, 1, 2, 3], 7)[0] == [1, 2, 3, 1, 2, 3, 1]


def test_fewer_tokens_than_are_verified_are_refused() -> None:
    with pytest.raises(ValueError, match="of which 3 are verified"):
        drafted(observed([1, 2, 3]), [1, 2], 1)


def test_a_gap_is_filled_by_the_next_question() -> None:
    source = observed([1, 2, 3])
    source.observe(0, 5, [2, 3, 4, 2, 3], NO_STATES)  # positions 3 and 4 are unknown
    text = [1, 2, 3, 8, 9, 2, 3, 4, 2, 3]
    assert drafted(source, text, 3)[0] == [4, 2, 3]
    source.truncate(0, 4)
    assert drafted(source, [*text[:4], 1], 1)[0] == [2]


def test_drafts_are_as_sure_as_matches_of_their_length_were_right() -> None:
    sure = observed([1, 2, 3, 4, 5, 6] * 6)
    draw = random.Random(1)
    text = [draw.randrange(3) for _ in range(300)]
    drafts, chances = drafted(sure, [1, 2, 3, 4, 5, 6] * 6 + [1, 2], 7)
    assert drafts == [3, 4, 5, 6, 1, 2, 3] and min(chances) > 0.85
    drafts, chances = drafted(observed(text), [*text, 0], 7)
    assert len(drafts) == 7 and max(chances) < 0.6  # a coin of three sides
    assert drafted(sure, [1, 2, 3, 4, 5, 6] * 6 + [9], 7) == ([], [])


def test_only_verified_tokens_are_learned_from() -> None:
    text = [1, 2, 3, 1, 2]
    asked, unasked = observed(text), observed(text)
    for drafts in ([3, 1, 2], [7, 7, 7, 7]):
        drafted(asked, [*text, *drafts], 4)
    for source in (asked, unasked):
        source.observe(0, 5, [3, 1], NO_STATES)
    assert drafted(asked, [*text, 3, 1], 4) == drafted(unasked, [*text, 3, 1], 4)


def test_chances_start_with_the_length_and_follow_what_came_out() -> None:
    precision = MatchPrecision()
    starts = [precision.chance(order) for order in range(1, MAX_ORDER + 1)]
    assert starts == sorted(starts) and 0 < starts[0] < starts[-1] == precision.chance(MAX_ORDER + 4) < 1
    for _ in range(400):
        precision.add(2, False)
        precision.add(3, True)
    assert precision.chance(2) < 0.05 and precision.chance(3) > 0.95
    for _ in range(1000):
        precision.add(2, True)
    assert precision.chance(2) > 0.8  # what was long ago counts less


@pytest.mark.parametrize("breaks_in", ["append", "truncate"])
def test_a_change_broken_off_anywhere_is_mended_by_the_next(breaks_in: str) -> None:
    """As Ctrl-C breaks it off, before each line alternately."""
    token_ids = [1, 2, 3, 1, 2, 3, 1, 2]
    for n_lines in range(1, 40):
        text, n_left = _Text(), n_lines
        text.become(token_ids)

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal n_left
            if frame.f_code.co_name != breaks_in:
                return None
            if event == "line":
                n_left -= 1
                if n_left == 0:
                    raise KeyboardInterrupt
            return trace

        change = partial(text.append, 3) if breaks_in == "append" else partial(text.truncate, 5)
        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt):
                change()
        finally:
            sys.settrace(None)
        text.truncate(4)
        fresh = _Text()
        for each in (text, fresh):
            each.become([*token_ids[:4], 2, 7])
        assert vars(text) == vars(fresh)
