"""Candidates of the lm_head."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.speculation.exits.features import likeliest

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
    found = likeliest(torch.tensor(rows), k)
    expected = [sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))[:k] for row in rows]
    assert found.token_ids.tolist() == expected
    assert found.logits.tolist() == [[row[i] for i in ids] for row, ids in zip(rows, expected, strict=True)]
    assert found.is_finite.all()


def test_a_large_vocabulary() -> None:
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1)).round(decimals=2)
    found = likeliest(logits)
    expected = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :4]
    assert found.token_ids.dtype == np.int64 and found.logits.dtype == np.float32
    np.testing.assert_array_equal(found.token_ids, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_mean_nothing_say_so_and_harm_no_other(bad: float) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    good = likeliest(logits)
    logits[1, 71] = bad
    found = likeliest(logits)
    assert found.is_finite.tolist() == [True, False, True]
    np.testing.assert_array_equal(found.token_ids[[0, 2]], good.token_ids[[0, 2]])


def test_excluded_tokens_are_no_fault_until_they_are_candidates() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    assert likeliest(logits, 2).is_finite.tolist() == [True]
    assert likeliest(logits, 3).is_finite.tolist() == [False]
