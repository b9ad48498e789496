"""Candidates of a head, and several sources as one."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_ee.exits.candidates import Choose, CombinedSource, DraftSource, HeadCandidates, merged_candidates
from hetero_ee.exits.ngram import NgramSource

# Few values, so that ties abound, within the candidates and across their edge.
ROWS = st.integers(1, 3).flatmap(
    lambda m: st.integers(1, 9).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from([-1.5, 0.0, 2.0, 7.0]), min_size=n, max_size=n), min_size=m, max_size=m
        )
    )
)


@given(rows=ROWS, k=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_largest_first_and_the_lowest_id_among_equals(rows: list[list[float]], k: int) -> None:
    found = HeadCandidates(k).of(torch.tensor(rows))
    expected = [sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:k] for row in rows]
    assert found.token_ids.tolist() == expected
    assert found.logits.tolist() == [[row[i] for i in ids] for row, ids in zip(rows, expected, strict=True)]
    assert found.is_finite.all()


def test_a_large_vocabulary() -> None:
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1)).round(decimals=2)
    found = HeadCandidates().of(logits)
    expected = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :4]
    assert found.token_ids.dtype == np.int64 and found.logits.dtype == np.float32
    np.testing.assert_array_equal(found.token_ids, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_mean_nothing_say_so_and_harm_no_other(bad: float) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    good = HeadCandidates().of(logits)
    logits[1, 71] = bad
    found = HeadCandidates().of(logits)
    assert found.is_finite.tolist() == [True, False, True]
    np.testing.assert_array_equal(found.token_ids[[0, 2]], good.token_ids[[0, 2]])


def test_excluded_tokens_are_no_fault_until_they_are_candidates() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    assert HeadCandidates(2).of(logits).is_finite.tolist() == [True]
    assert HeadCandidates(3).of(logits).is_finite.tolist() == [False]


class Recorder:
    """A source that says what it was told to, and writes down what it is told."""

    def __init__(self, chain: list[int], candidates: list[int]) -> None:
        self.chain, self.known = chain, candidates
        self.told: list[object] = []

    def propose(self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose) -> list[int]:
        return self.chain[:n_tokens]

    def candidates(self, sequence: int, token_ids: Sequence[int], k: int) -> list[int]:
        return self.known[:k]

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        self.told.append(("observe", sequence, first_position, token_ids, normed))

    def truncate(self, sequence: int, length: int) -> None:
        self.told.append(("truncate", sequence, length))

    def close(self, sequence: int) -> None:
        self.told.append(("close", sequence))


def ask(*sources: DraftSource, k: int = 4) -> tuple[list[int], list[int]]:
    combined = CombinedSource(sources)
    return combined.propose(0, [1, 2], k, lambda logits, before: 0), combined.candidates(0, [1, 2], k)


@pytest.mark.parametrize(
    ("sources", "chain", "candidates"),
    [
        ([], [], []),
        ([([], []), ([], [])], [], []),
        ([([1, 2], [3, 4]), ([5, 6, 7], [4, 5, 3, 6, 7])], [1, 2], [3, 4, 5, 6]),
        ([([], [9]), ([5, 6, 7, 8, 9], [9, 9, 8])], [5, 6, 7, 8], [9, 8]),
        ([([1], [1, 2, 3, 4]), ([2], [5])], [1], [1, 2, 3, 4]),
    ],
)
def test_one_source_after_the_other(
    sources: list[tuple[list[int], list[int]]], chain: list[int], candidates: list[int]
) -> None:
    assert ask(*(Recorder(*source) for source in sources)) == (chain, candidates)


def test_merging_ends_with_k_different_tokens() -> None:
    assert merged_candidates([[3, 3, 1], [1, 2], [5]], 3) == [3, 1, 2]
    assert merged_candidates([[3]], 0) == []


def test_all_sources_hear_everything() -> None:
    sources, states = [Recorder([], []), Recorder([], [])], torch.zeros(2, 3)
    combined = CombinedSource(sources)
    combined.observe(4, 7, [1, 2], states)
    combined.truncate(4, 8)
    combined.close(4)
    expected = [("observe", 4, 7, [1, 2], states), ("truncate", 4, 8), ("close", 4)]
    assert [source.told for source in sources] == [expected, expected]


def test_ngrams_are_a_source() -> None:
    source: DraftSource = NgramSource()
    source.observe(0, 0, [1, 2, 3], torch.empty(3, 8))
    combined = CombinedSource([source, Recorder([9], [7, 2])])
    assert combined.propose(0, [1, 2, 3, 1, 2], 2, lambda logits, before: 0) == [3, 1]
    assert combined.propose(0, [1, 2, 3, 5], 2, lambda logits, before: 0) == [9]
    assert combined.candidates(0, [1, 2, 3, 1], 4) == [2, 7]
