"""Two sources as one: whose drafts make a chain, what is asked of the judge, and that both hear everything."""

from collections.abc import Sequence

import pytest
import torch
from hetero_ee.speculation.sources.combined import CombinedSource
from torch import Tensor

from hetero_ee.speculation.exits.candidates import ChainJudge, Choose, DraftSource
from hetero_ee.speculation.sources.ngram import NgramSource

TEXT = [1, 2, 3, 4, 1, 2]  # goes on with 3, 4, 1 by its n-grams
STATES = torch.empty(len(TEXT) - 1, 8)


class Recorder:
    """A source that says what it was told to, as far as its judge lets it, and writes down what it is told."""

    def __init__(self, chain: list[int], candidates: list[int] = ()) -> None:  # type: ignore[assignment]
        self.chain, self.known = chain, list(candidates)
        self.told: list[object] = []

    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        found: list[int] = []
        for token_id in self.chain[:n_tokens]:
            found.append(token_id)
            if judge is not None and not judge.goes_on():
                break
        return found

    def candidates(self, sequence: int, token_ids: Sequence[int], k: int) -> list[int]:
        return self.known[:k]

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        self.told.append(("observe", sequence, first_position, token_ids, normed))

    def truncate(self, sequence: int, length: int) -> None:
        self.told.append(("truncate", sequence, length))

    def close(self, sequence: int) -> None:
        self.told.append(("close", sequence))


class Verdicts:
    """A judge of fixed answers: n-grams that lead and follow, computed drafts wanted. asked: the chances it saw."""

    def __init__(self, n_leading: int, n_following: int, n_computed: int) -> None:
        self._n_leading, self._n_following, self._n_left = n_leading, n_following, n_computed
        self.asked: list[list[float]] = []

    def goes_on(self) -> bool:
        self._n_left -= 1
        return self._n_left > 0

    def leading(self, chances: Sequence[float], n_tokens: int) -> int:
        self.asked.append(list(chances))
        return min(self._n_leading, len(chances))

    def following(self, chances: Sequence[float]) -> int:
        self.asked.append(list(chances))
        return min(self._n_following, len(chances))


def choose(logits: Tensor, before: Sequence[int]) -> int:
    raise AssertionError("there are no logits to choose from")


def combined(computed: Recorder) -> CombinedSource:
    source = CombinedSource(NgramSource(), computed)
    source.observe(0, 0, TEXT[:-1], STATES)
    return source


@pytest.mark.parametrize(
    ("judge", "chain"),
    [
        (Verdicts(2, 9, 9), [3, 4]),  # n-grams alone, nothing computed
        (Verdicts(0, 0, 9), [3, 7, 8, 9]),
        (Verdicts(0, 0, 2), [3, 7]),
        (Verdicts(0, 9, 1), [3, 4, 1, 2]),  # what follows "1 2 3", up to what there is room for
        (Verdicts(0, 1, 1), [3, 4]),
        (Verdicts(0, 9, 2), [3, 7]),  # nothing has ever followed a 7
    ],
)
def test_the_judge_says_whose_drafts_make_the_chain(judge: Verdicts, chain: list[int]) -> None:
    assert combined(Recorder([3, 7, 8, 9])).propose(0, TEXT, 4, choose, judge) == chain


def test_ngrams_make_the_chain_where_the_other_has_none() -> None:
    assert combined(Recorder([])).propose(0, TEXT, 3, choose, Verdicts(0, 2, 9)) == [3, 4]


def test_chances_grow_with_the_match_and_with_what_was_right() -> None:
    judge, source = Verdicts(0, 0, 1), combined(Recorder([3]))
    source.propose(0, TEXT, 5, choose, judge)
    leading, following = judge.asked
    assert len(leading) == 5 and len(following) == 4
    assert leading == sorted(leading) and 0 < leading[0] < leading[-1] < 1
    source.observe(0, 5, [2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1], torch.empty(12, 8))
    source.propose(0, [*TEXT, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 5, choose, judge)
    assert judge.asked[2][-1] > leading[-1]


def test_without_a_judge_ngrams_come_first() -> None:
    assert combined(Recorder([9])).propose(0, TEXT, 2, choose) == [3, 4]
    assert combined(Recorder([9])).propose(0, [*TEXT, 5], 2, choose) == [9]


def test_candidates_are_filled_up_from_ngrams() -> None:
    assert combined(Recorder([], [7, 2])).candidates(0, TEXT, 3) == [7, 2, 3]
    assert combined(Recorder([], [7, 2])).candidates(0, TEXT, 2) == [7, 2]


def test_both_sources_hear_everything() -> None:
    source, other = NgramSource(), Recorder([])
    both: DraftSource = CombinedSource(source, other)
    both.observe(4, 0, TEXT, STATES)
    both.truncate(4, 5)
    assert source.n_tokens == 5
    both.close(4)
    assert source.n_tokens == 0
    assert other.told == [("observe", 4, 0, TEXT, STATES), ("truncate", 4, 5), ("close", 4)]
