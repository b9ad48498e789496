"""choose_token's short cuts: token by token what its definition says, written out in torch, for random logits."""

import math

import numpy as np
import pytest
import torch

from hetero_ee.decoding.sampling import MAX_RUNS, choose_token
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.choice import gumbel_noise
from tests.sampling_support import filtered_probabilities

FILTERS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "cold": {"temperature": 1e-3},
    "coldest": {"temperature": 5e-324},
    "hot": {"temperature": 100.0},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.3, "min_p": 0.02},
    "all": {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repeat_penalty": 1.3},
}


def defined_noise(n_tokens: int, seed: int, sequence: int, position: int) -> torch.Tensor:
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, sequence, position], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(n_tokens)
    uniform = (torch.from_numpy((bits >> 12).astype(np.int64)).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def defined_filter(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    n_kept = len(scores) if params.top_k == 0 else min(params.top_k, len(scores))
    values, order = torch.sort(scores, descending=True, stable=True)
    values, order = values[:n_kept], order[:n_kept]
    if params.top_p < 1:
        probabilities = torch.softmax(values, 0)
        n_kept = max(1, int((torch.cumsum(probabilities, 0) - probabilities < params.top_p).sum()))
        values, order = values[:n_kept], order[:n_kept]
    probabilities = torch.softmax(values, 0)
    kept = order[probabilities >= params.min_p * probabilities[0]]
    return torch.full_like(scores, -math.inf).index_copy(0, kept, scores[kept])


def defined_token(logits: torch.Tensor, history: list[int], params: SamplingParams, position: int) -> int:
    seen = torch.tensor(sorted(set(history)))
    penalized = torch.where(logits > 0, logits / params.repeat_penalty, logits * params.repeat_penalty)
    scores = logits.index_put((seen,), penalized[seen])
    if params.temperature == 0:
        return int((scores == scores.max()).nonzero()[0])
    tempered = (scores.double() - scores.double().max()) / params.temperature
    noisy = defined_filter(tempered, params) + defined_noise(len(scores), params.seed, 2, position)
    return int((noisy == noisy.max()).nonzero()[0])


def random_logits(seed: int, n_tokens: int) -> torch.Tensor:
    """Every third has many equal values, every fifth one far above the others."""
    logits = torch.randn(n_tokens, generator=torch.Generator().manual_seed(seed)) * 4
    if seed % 3 == 0:
        logits = torch.round(logits * 2) / 2
    if seed % 5 == 0:
        logits[seed % n_tokens] = 30.0
    return logits


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("n_tokens", [1, 2, 17, 300, 5000])
def test_tokens_are_the_definitions(name: str, n_tokens: int) -> None:
    for seed in range(30):
        logits, params = random_logits(seed, n_tokens), SamplingParams(seed=seed, **FILTERS[name])  # type: ignore[arg-type]
        history = [0, seed % n_tokens, n_tokens - 1]
        before = logits.clone()
        for position in (1, 1000 + seed):
            expected = defined_token(logits, history, params, position)
            assert choose_token(logits, history, params, 2, position) == expected
        assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all"])
@pytest.mark.parametrize("n_runs", [1, 5, 100, 4 * MAX_RUNS])
def test_of_equals_the_lowest_ids_stay(name: str, n_runs: int) -> None:
    params = SamplingParams(**FILTERS[name]).changed(repeat_penalty=1.0, temperature=100.0)  # type: ignore[arg-type]
    for seed in range(5):
        order = torch.randperm(5 * n_runs, generator=torch.Generator().manual_seed(seed))
        logits = torch.arange(n_runs).float().repeat(5)[order]
        tempered = (logits.double() - logits.double().max()) / params.temperature
        expected = torch.softmax(defined_filter(tempered, params), 0)
        assert torch.equal(filtered_probabilities(logits, [], params), expected)


@pytest.mark.parametrize("n_tokens", [1, 7, 1000, 32_000])
def test_noise_has_the_definitions_bits(n_tokens: int) -> None:
    for seed in (0, 1, 2**64 - 1):
        assert torch.equal(gumbel_noise(n_tokens, seed, 3, 11), defined_noise(n_tokens, seed, 3, 11))


def test_noise_that_is_known_stays_as_it_is() -> None:
    known, params = gumbel_noise(300, 5, 2, 9), SamplingParams(temperature=0.8, seed=5)
    before = known.clone()
    assert choose_token(random_logits(1, 300), [], params, 2, 9, noise=lambda *_: known) == defined_token(
        random_logits(1, 300), [0], params, 9
    )
    assert torch.equal(known, before)
