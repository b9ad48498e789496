"""Every combination of filters: what choose_token draws follows filtered_probabilities, and wrong samplers are caught.

Chi-square over a vocabulary of 16. A truly random sampler would fail each test once in a million seeds; the seeds are
fixed.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.decoding.sampling import choose_token
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.choice import gumbel_noise
from tests.sampling_support import filtered_probabilities

VOCABULARY, N_DRAWS, FALSE_FAIL_RATE = 16, 4000, 1e-6
LEAST_EXPECTED = 5.0  # of a bin; rarer outcomes share one
LOGITS = torch.linspace(2, -3, VOCABULARY)[torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(41))]
BEST = LOGITS.argsort(descending=True).tolist()
HISTORY = [BEST[3], BEST[9], BEST[9], BEST[12], BEST[0]]
FILTERS: dict[str, float] = {"top_k": 7, "top_p": 0.85, "min_p": 0.05, "repeat_penalty": 1.4}
SUBSETS = [subset for n in range(5) for subset in itertools.combinations(FILTERS, n)]
Draw = Callable[[SamplingParams, int], int]  # parameters, position -> token


def params_of(subset: Sequence[str], seed: int = 0, temperature: float = 0.9) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, **{name: FILTERS[name] for name in subset})  # type: ignore[arg-type]


def ours(params: SamplingParams, position: int) -> int:
    return choose_token(LOGITS, HISTORY, params, 0, position)


def p_value(outcomes: Any, expected: np.ndarray) -> float:
    """Of counted outcomes, numbers below len(expected), under these probabilities; 0 where an impossible one came."""
    from scipy.stats import chisquare  # nearly a second, which only the process that runs these tests pays

    counts = np.bincount(outcomes, minlength=len(expected)).astype(float)
    if counts[expected == 0].any():
        return 0.0
    means = expected / expected.sum() * counts.sum()
    is_rare = (means < LEAST_EXPECTED) & (means > 0)
    common = (means >= LEAST_EXPECTED).nonzero()[0]
    counts, means = (np.append(x[common], x[is_rare].sum()) for x in (counts, means))
    if means[-1] < LEAST_EXPECTED:  # too rare even together: the least common bin takes them
        least = int(means[:-1].argmin())
        counts[least], means[least] = counts[least] + counts[-1], means[least] + means[-1]
        counts, means = counts[:-1], means[:-1]
    return 1.0 if len(means) == 1 else float(chisquare(counts, means).pvalue)


def fit(params: SamplingParams, draw: Draw = ours) -> float:
    """p-value of what `draw` draws at N_DRAWS positions, under the exact distribution of params."""
    outcomes = [draw(params, position) for position in range(N_DRAWS)]
    return p_value(outcomes, filtered_probabilities(LOGITS, HISTORY, params).numpy())


def pair_fit(draw: Draw, params: SamplingParams, n_kept: int = 4) -> float:
    """p-value of the tokens at neighbouring positions as pairs, under independence; tokens beyond n_kept are one."""
    single = filtered_probabilities(LOGITS, HISTORY, params).numpy()
    best = np.argsort(-single)[:n_kept].tolist()
    number = {token: best.index(token) if token in best else n_kept for token in range(VOCABULARY)}
    folded = np.append(single[best], max(0.0, 1 - single[best].sum()))
    tokens = [number[draw(params, position)] for position in range(N_DRAWS)]
    pairs = [first * (n_kept + 1) + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
    return p_value(pairs, np.outer(folded, folded).ravel())


@pytest.mark.few(7)
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "+".join(subset) or "none")
@pytest.mark.sample(1)
def test_every_combination_of_filters_draws_the_exact_distribution(subset: tuple[str, ...]) -> None:
    params = params_of(subset, seed=SUBSETS.index(subset))
    assert fit(params) > FALSE_FAIL_RATE
    assert 1 < int((filtered_probabilities(LOGITS, HISTORY, params) > 0).sum()) <= VOCABULARY


@pytest.mark.parametrize("temperature", [0.1, 2.0, 50.0])
@pytest.mark.sample(0)
def test_every_temperature_draws_the_exact_distribution(temperature: float) -> None:
    for subset in ((), tuple(FILTERS)):
        assert fit(params_of(subset, 77, temperature)) > FALSE_FAIL_RATE


@pytest.mark.sample(0)
def test_neighbouring_positions_are_independent() -> None:
    for seed, subset in enumerate(((), ("top_k",), tuple(FILTERS))):
        assert pair_fit(ours, params_of(subset, seed)) > FALSE_FAIL_RATE


def test_the_filters_change_the_distribution() -> None:
    """Otherwise the controls below would show nothing."""
    exact = {
        subset: tuple(filtered_probabilities(LOGITS, HISTORY, params_of(subset)).numpy().round(6)) for subset in SUBSETS
    }
    for name in FILTERS:
        assert exact[(name,)] != exact[()]


# Negative controls.


def with_noise_of(place: Callable[[int], int]) -> Draw:
    """A sampler that takes another position's noise."""
    return lambda params, position: choose_token(LOGITS, HISTORY, params, 0, place(position))


def filtered_draw(kept_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Draw:
    """A sampler with a filter of its own: the sorted probabilities and their running sum say which stay."""

    def draw(params: SamplingParams, position: int) -> int:
        scores = LOGITS.double() / params.temperature
        values, order = torch.sort(torch.softmax(scores, 0), descending=True)
        kept = order[kept_of(values, torch.cumsum(values, 0))]
        noisy = scores + gumbel_noise(VOCABULARY, params.seed, 0, position)
        return int(kept[noisy[kept].argmax()])

    return draw


N_TOP_K = int(FILTERS["top_k"])
FILTER_DEFECTS: dict[str, tuple[str, Draw, Draw]] = {  # the filter, a sampler that has it right, one that is off by one
    "top-k takes one more": (
        "top_k",
        filtered_draw(lambda values, _: torch.arange(VOCABULARY) < N_TOP_K),
        filtered_draw(lambda values, _: torch.arange(VOCABULARY) < N_TOP_K + 1),
    ),
    "top-k takes one less": (
        "top_k",
        filtered_draw(lambda values, _: torch.arange(VOCABULARY) < N_TOP_K),
        filtered_draw(lambda values, _: torch.arange(VOCABULARY) < N_TOP_K - 1),
    ),
    "top-p leaves out the token that crosses it": (
        "top_p",
        filtered_draw(lambda values, sums: sums - values < FILTERS["top_p"]),
        filtered_draw(lambda values, sums: sums < FILTERS["top_p"]),
    ),
    "min-p measures the second best": (
        "min_p",
        filtered_draw(lambda values, _: values >= FILTERS["min_p"] * values[0]),
        filtered_draw(lambda values, _: values >= FILTERS["min_p"] * values[1]),
    ),
}


@pytest.mark.parametrize("name", FILTER_DEFECTS)
@pytest.mark.sample(1)
def test_a_filter_that_is_off_by_one_is_caught(name: str) -> None:
    filter_name, right, wrong = FILTER_DEFECTS[name]
    params = params_of((filter_name,), seed=5)
    assert fit(params, right) > FALSE_FAIL_RATE > fit(params, wrong)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_wrong_temperature_is_caught(factor: float) -> None:
    params = params_of((), seed=6)
    wrong = replace(params, temperature=params.temperature * factor)
    assert fit(params, lambda _, position: ours(wrong, position)) < FALSE_FAIL_RATE


def test_a_penalty_that_misses_the_last_token_is_caught() -> None:
    params = params_of(("repeat_penalty",), seed=7)
    wrong = fit(params, lambda _, position: choose_token(LOGITS, HISTORY[:-1], params, 0, position))
    assert wrong < FALSE_FAIL_RATE


def test_noise_that_two_positions_share_is_caught() -> None:
    """Each position's tokens follow the distribution, so that pairs alone can show it."""
    params = params_of((), seed=8)
    assert fit(params, with_noise_of(lambda position: 3 * position)) > FALSE_FAIL_RATE
    assert pair_fit(with_noise_of(lambda position: position - position % 2), params) < FALSE_FAIL_RATE
