"""Noise that a draft's position and its token share: the numbers of gumbel_noise, computed once, kept no longer."""

import math

import pytest
import torch

from hetero_ee.decoding import sampling
from hetero_ee.decoding.sampling import RememberedNoise
from hetero_ee.runtime.choice import all_finite, gumbel_noise


def test_it_is_computed_once_and_forgotten_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counted(*place: int) -> torch.Tensor:
        computed.append(place)
        return gumbel_noise(*place)

    monkeypatch.setattr(sampling, "gumbel_noise", counted)
    noise, places = RememberedNoise(), [(16, 1, 2, 3), (16, 1, 2, 4), (16, 1, 5, 3), (16, 9, 2, 3)]
    for place in places:
        for _ in range(2):
            assert torch.equal(noise.of_draft(*place), gumbel_noise(*place))
    for place in places:
        assert torch.equal(noise.of_token(*place), gumbel_noise(*place))
    assert computed == places
    assert torch.equal(noise.of_token(*places[0]), gumbel_noise(*places[0]))  # again, where it is asked for again
    assert computed == [*places, places[0]]


def test_nothing_is_kept_of_a_sequence_that_has_ended() -> None:
    noise = RememberedNoise()
    kept = noise.of_draft(16, 1, 3, 4)
    noise.of_draft(16, 1, 2, 4)
    noise.close(2)
    assert list(noise._kept) == [(16, 1, 3, 4)]
    assert noise.of_draft(16, 1, 3, 4) is kept


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_none_is_seen(bad: float) -> None:
    logits = torch.zeros(2000)
    assert all_finite(logits)
    logits[1234] = bad
    assert not all_finite(logits)
    assert all_finite(torch.full((2000,), 3e38))  # whose sum is infinite
