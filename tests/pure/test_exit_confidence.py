"""A single token's confidence: that of the network that judges on a GPU, and none of a token that means nothing."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hetero_ee.speculation.exits.predictor import ExitConfidence, ExitPredictor
from hetero_ee_kernels.reference import judged


def network(n_hidden: int = 64, seed: int = 1) -> ExitPredictor:
    rng = np.random.default_rng(seed)

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    mean = np.array([8.0] * 4 + [0.25] * 4 + [0.1] * 4, np.float32)
    first, second = random(n_hidden, 12, scale=0.15), random(n_hidden, scale=n_hidden**-0.5)
    return ExitPredictor(first, 1 + random(n_hidden) - first @ mean, second, random(1))


CONFIDENCE = ExitConfidence(network())


def spread(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n).astype(np.float32) * 4 + 8


def tied(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(-2, 3, n).astype(np.float32)


@pytest.mark.parametrize("n", [4, 5, 4096])
@pytest.mark.parametrize("logits_of", [spread, tied])
def test_a_row_is_judged_as_on_a_gpu(n: int, logits_of: Callable[[np.random.Generator, int], np.ndarray]) -> None:
    for seed in range(12):
        logits = torch.from_numpy(logits_of(np.random.default_rng(seed), n))
        expected = float(judged(logits, *CONFIDENCE.network))
        assert CONFIDENCE.of_row(logits) == pytest.approx(expected, abs=2e-5)


def test_an_unlikely_token_may_be_impossible() -> None:
    logits = torch.arange(200.0)
    logits[:100] = -math.inf
    assert CONFIDENCE.of_row(logits) == pytest.approx(float(judged(logits, *CONFIDENCE.network)), abs=2e-5)


@pytest.mark.parametrize("n_hidden", [5, 64, 512])
def test_candidates_keep_their_order_and_remember(n_hidden: int) -> None:
    confidence, softmax, found = ExitConfidence(network(n_hidden)), np.zeros(4, np.float32), []
    for seed in range(5):  # levels, one after the other
        logits = np.random.default_rng(seed).standard_normal(4).astype(np.float32)
        found.append(confidence.of_candidates(logits, softmax))
        np.testing.assert_allclose(softmax, np.exp(logits) / np.exp(logits).sum(), atol=2e-7)
    afresh = confidence.of_candidates(logits, np.zeros(4, np.float32))
    turned = confidence.of_candidates(logits[::-1].copy(), np.zeros(4, np.float32))
    assert np.std(found) > 1e-3 and len({found[-1], afresh, turned}) == 3


@pytest.mark.parametrize("n", [5, 4096])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_a_row_that_means_nothing_has_none(n: int, bad: float) -> None:
    for place in {0, n // 2, n - 1}:
        logits = torch.zeros(n)
        logits[place] = bad
        assert math.isnan(CONFIDENCE.of_row(logits))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_so_do_candidates(bad: float) -> None:
    logits = np.array([1, 2, bad, 0], np.float32)
    assert math.isnan(CONFIDENCE.of_candidates(logits, np.zeros(4, np.float32)))
    assert math.isnan(CONFIDENCE.of_candidates(np.abs(logits[[0, 1, 3, 3]]), np.full(4, np.nan, np.float32)))


def test_too_few_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="3 logits"):
        CONFIDENCE.of_row(torch.zeros(3))
