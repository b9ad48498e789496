"""The exit predictor against float64: 1e-5 of a probability."""

from typing import Any

import pytest
import torch

from hetero_ee_kernels import reference
from hetero_ee_kernels.exit_predictor import exit_predictor
from tests.gpu_support import DEVICE, Guarded, assert_same_bits, guarded_copy, random

TOLERANCE = 1e-5


def network(seed: int, c: int, h: int, dtype: Any = torch.float32) -> list[torch.Tensor]:
    parts = [random(seed, h, 3 * c), random(seed + 1, h), random(seed + 2, h, scale=h**-0.5), random(seed + 3, 1)]
    return [part.to(dtype) for part in parts]


def expected(logits: Any, previous: Any, parts: Any, bug: str = "") -> tuple[Any, Any]:
    first, first_bias, second, second_bias = (part.double() for part in parts)
    softmax = torch.softmax(logits.double(), -1)
    change = previous - softmax if bug == "change" else softmax - previous.double()
    order = [softmax, logits.double(), change] if bug == "order" else [logits.double(), softmax, change]
    inner = torch.cat(order, -1) @ first.T + (0 if bug == "bias" else first_bias)
    inner = inner if bug == "relu" else inner.clamp(min=0)
    return torch.sigmoid(inner @ second + second_bias), softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("c", "h"), [(4, 512), (4, 64), (1, 1), (3, 70), (7, 33)])
def test_accurate_and_the_softmax_is_left_for_the_next_layer(c: int, h: int, dtype: Any) -> None:
    logits, parts = random(c, 5, c, scale=4.0), network(h, c, h, dtype)
    previous, out = guarded_copy(torch.softmax(random(h + 9, 5, c), -1)), Guarded((5,))
    before = previous.tensor.clone()
    assert exit_predictor(logits, previous.tensor, *parts, out.tensor) is out.tensor
    chance, softmax = expected(logits, before, parts)
    assert (out.check().double() - chance).abs().max() <= TOLERANCE
    assert (previous.check().double() - softmax).abs().max() <= 1e-6
    found = reference.exit_predictor(logits, before, *parts)
    assert (found.double() - chance).abs().max() <= TOLERANCE and (before.double() - softmax).abs().max() <= 1e-6


def test_bits_depend_on_the_row_alone() -> None:
    logits, before, parts = random(1, 16, 4), random(2, 16, 4), network(3, 4, 64)
    whole = exit_predictor(logits, before.clone(), *parts)
    for m in range(1, 17):
        assert_same_bits(exit_predictor(logits[-m:].clone(), before[-m:].clone(), *parts), whole[-m:])


def test_nan_and_extremes_stay_in_their_row() -> None:
    logits, before, parts = random(1, 4, 4), torch.zeros(4, 4, device=DEVICE), network(3, 4, 64)
    good = exit_predictor(logits, before.clone(), *parts)
    logits[1, 2], logits[2] = float("nan"), torch.tensor([300.0, -300.0, 0.0, 299.0])
    found = exit_predictor(logits, before.clone(), *parts)
    assert found[1].isnan() and 0 <= float(found[2]) <= 1
    assert_same_bits(found[[0, 3]], good[[0, 3]])


def test_wrong_arguments_are_refused() -> None:
    logits, before, parts = random(1, 2, 4), random(2, 2, 4), network(3, 4, 8)
    for bad in (
        lambda: exit_predictor(logits, before[:1], *parts),
        lambda: exit_predictor(logits, before, parts[0][:, :11], *parts[1:]),
        lambda: exit_predictor(logits, before, parts[0].half(), *parts[1:]),
        lambda: exit_predictor(logits.double(), before, *parts),
        lambda: exit_predictor(logits, before, *[part.double() for part in parts]),
        lambda: exit_predictor(logits, before, *parts, torch.empty(3, device=DEVICE)),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize("bug", ["change", "order", "bias", "relu"])
def test_the_tolerance_catches(bug: str) -> None:
    logits, before, parts = random(1, 3, 4), torch.softmax(random(2, 3, 4), -1), network(3, 4, 64)
    found = exit_predictor(logits, before.clone(), *parts).double()
    assert (found - expected(logits, before, parts)[0]).abs().max() <= TOLERANCE
    assert (found - expected(logits, before, parts, bug)[0]).abs().max() > 10 * TOLERANCE
