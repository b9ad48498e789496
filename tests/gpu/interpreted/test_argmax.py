"""Argmax: the lowest id of the largest value, the first NaN before all."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.argmax import PIECE, argmax
from tests.gpu_support import DEVICE, Guarded, random

NAN, INF = float("nan"), float("inf")


def check(logits: Any) -> list[int]:
    """The winners, once the kernel and plain torch agree on them."""
    out = Guarded((len(logits),), torch.int64)
    assert argmax(logits, out.tensor) is out.tensor
    found = out.check().tolist()
    assert found == reference.argmax(logits).tolist()
    return [int(winner) for winner in found]


@pytest.mark.parametrize("n", [1, 2, 100, PIECE, PIECE + 1, 3 * PIECE - 5])
def test_random_logits(n: int) -> None:
    logits = random(n, 3, n)
    assert check(logits) == logits.cpu().numpy().argmax(1).tolist()


def test_ties_go_to_the_lowest_id_across_pieces() -> None:
    logits = torch.zeros((4, 2 * PIECE + 3), device=DEVICE)
    logits[0, [PIECE - 1, PIECE, 2 * PIECE + 2]] = 5.0
    logits[1, [2 * PIECE, 2 * PIECE + 1]] = 5.0
    logits[2] = -INF
    logits[3, 0] = -0.0  # equal to the zeros after it
    assert check(logits) == [PIECE - 1, 2 * PIECE, 0, 0]


def test_the_first_nan_wins_whatever_its_sign() -> None:
    logits = random(1, 3, PIECE + 10)
    logits[0, [PIECE + 2, PIECE + 5]] = NAN
    logits[1, 3], logits[1, 9] = INF, NAN
    logits.view(torch.int32)[2, 7] = -3  # a NaN with its sign set
    assert check(logits) == [PIECE + 2, 9, 7]


def test_infinities_and_the_smallest_numbers() -> None:
    rows = [[-INF, -1.0, INF, 3.0], [-INF, -1e-45, 0.0, -3.0], [-2.0, -1.0, -1.0, -3.0], [0.0, 1e-45, -0.0, 0.0]]
    assert check(torch.tensor(rows, device=DEVICE)) == [2, 2, 1, 1]


def test_wrong_logits_are_refused() -> None:
    for wrong in (random(2, 4), random(2, 2, 4).half(), random(2, 2, 4)[:, ::2], random(2, 2, 0)):
        with pytest.raises(ValueError, match="logits are"):
            argmax(wrong)
    with pytest.raises(ValueError, match="out is"):
        argmax(random(2, 2, 4), torch.empty(3, dtype=torch.int64, device=DEVICE))
    assert argmax(random(2, 0, 4)).shape == (0,)
