"""A token's confidence in one compiled call is what features.py and predictor.py say, for all logits."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hetero_ee.speculation.exits.predictor import ExitConfidence, ExitPredictor
from hetero_ee_cpu_ops.exit_confidence import BLOCK, exit_confidence

SIZES = [4, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 4096, 32_000]


def network(n_hidden: int = 64, seed: int = 1) -> ExitPredictor:
    rng = np.random.default_rng(seed)

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    mean = np.array([8.0] * 4 + [0.25] * 4 + [0.1] * 4, np.float32)
    first, second = random(n_hidden, 12, scale=0.15), random(n_hidden, scale=n_hidden**-0.5)
    return ExitPredictor(first, 1 + random(n_hidden) - first @ mean, second, random(1))


def both(predictor: ExitPredictor) -> tuple[ExitConfidence, ExitConfidence]:
    return ExitConfidence(predictor, compiled=True), ExitConfidence(predictor, compiled=False)


def spread(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n).astype(np.float32) * 4 + 8


def tied(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(-2, 3, n).astype(np.float32)


def rising(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.sort(spread(rng, n))  # every one enters the best four


def far_apart(rng: np.random.Generator, n: int) -> np.ndarray:
    return spread(rng, n) * 10


@pytest.mark.sample(2)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("logits_of", [spread, tied, rising, far_apart])
def test_a_row_has_the_same_confidence(n: int, logits_of: Callable[[np.random.Generator, int], np.ndarray]) -> None:
    compiled, reference = both(network())
    for seed in range(12):
        logits = torch.from_numpy(logits_of(np.random.default_rng(seed), n))
        softmax = np.full(4, 0.25 * (seed % 2), np.float32)
        its_softmax = softmax.copy()
        found, expected = compiled.of_row(logits, softmax), reference.of_row(logits, its_softmax)
        assert found == pytest.approx(expected, abs=2e-6)
        np.testing.assert_allclose(softmax, its_softmax, atol=2e-7)
    assert compiled.of_row(logits) == pytest.approx(reference.of_row(logits), abs=2e-6)


@pytest.mark.parametrize("n_hidden", [5, 64, 512])
def test_candidates_keep_their_order_and_remember(n_hidden: int) -> None:
    compiled, reference = both(network(n_hidden))
    softmax, its_softmax = np.zeros(4, np.float32), np.zeros(4, np.float32)
    found = []
    for seed in range(5):  # levels, one after the other
        logits = np.random.default_rng(seed).standard_normal(4).astype(np.float32)
        found.append(compiled.of_candidates(logits, softmax))
        assert found[-1] == pytest.approx(reference.of_candidates(logits, its_softmax), abs=2e-6)
        np.testing.assert_allclose(softmax, its_softmax, atol=2e-7)
    turned = compiled.of_candidates(logits[::-1].copy(), np.zeros(4, np.float32))
    assert turned != pytest.approx(compiled.of_candidates(logits, np.zeros(4, np.float32)), abs=1e-4)
    assert np.std(found) > 1e-3


@pytest.mark.parametrize("n", [5, BLOCK, 4096])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_row_that_means_nothing_has_none(n: int, bad: float) -> None:
    for place in {0, n // 2, n - 1}:
        logits = torch.zeros(n)
        logits[place] = bad
        for confidence in both(network()):
            assert math.isnan(confidence.of_row(logits))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_so_do_candidates(bad: float) -> None:
    logits = np.array([1, 2, bad, 0], np.float32)
    for confidence in both(network()):
        assert math.isnan(confidence.of_candidates(logits, np.zeros(4, np.float32)))
        assert math.isnan(confidence.of_candidates(np.abs(logits[[0, 1, 3, 3]]), np.full(4, np.nan, np.float32)))


def test_an_unlikely_token_may_be_impossible() -> None:
    logits = torch.arange(200.0)
    logits[:100] = -math.inf
    compiled, reference = both(network())
    assert compiled.of_row(logits) == pytest.approx(reference.of_row(logits), abs=2e-6)


def test_what_does_not_fit_is_refused() -> None:
    for confidence in both(network()):
        with pytest.raises(ValueError, match="3 logits"):
            confidence.of_row(torch.zeros(3))
    whole = network()
    parts = [whole.first.T.copy(), whole.first_bias, whole.second, whole.second_bias]
    logits, softmax = np.zeros(9, np.float32), np.zeros(4, np.float32)
    for place, part in enumerate(parts):
        wrong = [*parts[:place], np.zeros((part.shape[0] + 1, *part.shape[1:]), np.float32), *parts[place + 1 :]]
        with pytest.raises(ValueError, match="do not"):
            exit_confidence(logits, softmax, *wrong, all_tokens=True)
    for values, remembered, all_tokens in (
        (logits, softmax, False),
        (logits[:3], softmax, True),
        (logits.astype(np.float64), softmax, True),
        (logits, softmax[:3], True),
        (logits[::2], softmax, True),
    ):
        with pytest.raises(ValueError, match="do not"):
            exit_confidence(values, remembered, *parts, all_tokens=all_tokens)
