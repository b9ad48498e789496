"""Sampling: the drawn tokens against the exact distribution, that distribution against two other implementations."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import logits_process as theirs

from hetero_ee.decoding.sampling import choose_token, filtered_scores
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.choice import gumbel_noise
from tests.sampling_support import filtered_probabilities

VOCABULARY = 16
N_DRAWS = 20_000
FALSE_FAIL_RATE = 1e-6  # of each chi-square test, were the draws truly random
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(7)) * 2
HISTORY = [2, 0, 2, 8, 12]  # likely and unlikely ones
COMBINATIONS = {
    "plain": SamplingParams(temperature=1.0, seed=1),
    "cold": SamplingParams(temperature=0.3, seed=2),
    "hot top-k": SamplingParams(temperature=1.5, top_k=6, seed=3),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8, seed=4),
    "min-p penalty": SamplingParams(temperature=0.7, min_p=0.03, repeat_penalty=1.3, seed=5),
    "all": SamplingParams(temperature=0.9, top_k=9, top_p=0.95, min_p=0.02, repeat_penalty=0.8, seed=2**64 - 1),
}


def draws(params: SamplingParams, n_draws: int = N_DRAWS, logits: torch.Tensor = LOGITS) -> list[int]:
    """One token for each position."""
    return [choose_token(logits, HISTORY, params, 0, position) for position in range(n_draws)]


def chi_square_survival(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees >= statistic): the regularised upper incomplete gamma function."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chance_of(outcomes: list[Any], expected: dict[Any, float]) -> float:
    """p-value of the outcomes under these probabilities; 0 where an impossible one came. Rare ones share a bin."""
    counts = Counter(outcomes)
    if any(expected.get(outcome, 0.0) == 0 for outcome in counts):
        return 0.0
    bins, rest = [], [0.0, 0.0]
    for outcome, probability in expected.items():
        count, mean = counts[outcome], probability * len(outcomes)
        if mean >= 10:
            bins.append((count, mean))
        else:
            rest = [rest[0] + count, rest[1] + mean]
    if rest[1] >= 1:
        bins.append((rest[0], rest[1]))
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    return chi_square_survival(statistic, len(bins) - 1)


def exact(params: SamplingParams) -> dict[Any, float]:
    return dict(enumerate(filtered_probabilities(LOGITS, HISTORY, params).tolist()))


def slow_probabilities(logits: torch.Tensor, history: list[int], params: SamplingParams) -> list[float]:
    """The definition, word by word, in Python floats."""
    scores = logits.tolist()
    for token in set(history):
        scores[token] *= 1 / params.repeat_penalty if scores[token] > 0 else params.repeat_penalty
    kept = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    kept = kept[: params.top_k or len(kept)]
    weights = {token: math.exp((scores[token] - scores[kept[0]]) / params.temperature) for token in kept}
    covered, enough = 0.0, params.top_p * sum(weights.values())
    while params.top_p < 1 and covered < enough and kept:
        covered += weights[kept.pop(0)]
    if params.top_p < 1:
        weights = {token: weight for token, weight in weights.items() if token not in kept}
    weights = {token: weight for token, weight in weights.items() if weight >= params.min_p * max(weights.values())}
    return [weights.get(token, 0.0) / sum(weights.values()) for token in range(len(scores))]


def their_probabilities(logits: torch.Tensor, history: list[int], params: SamplingParams) -> torch.Tensor:
    """transformers' processors in the order its generate applies them."""
    processors: list[Callable[..., torch.Tensor]] = [
        theirs.RepetitionPenaltyLogitsProcessor(params.repeat_penalty),
        theirs.TemperatureLogitsWarper(params.temperature),
    ]
    if params.top_k:
        processors.append(theirs.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(theirs.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(theirs.MinPLogitsWarper(params.min_p))
    scores = logits[None].double()
    for processor in processors:
        scores = processor(torch.tensor([history]), scores)
    return torch.softmax(scores[0], 0)


def test_the_survival_function_has_the_tabulated_values() -> None:
    for statistic, freedom, tabulated in ((3.841459, 1, 0.05), (16.811894, 6, 0.01), (37.697298, 15, 0.001)):
        assert chi_square_survival(statistic, freedom) == pytest.approx(tabulated, rel=1e-5)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.sample(1)
def test_drawn_tokens_follow_the_exact_distribution(name: str) -> None:
    params = COMBINATIONS[name]
    assert chance_of(draws(params), exact(params)) > FALSE_FAIL_RATE


@pytest.mark.sample(0)
def test_positions_sequences_and_seeds_are_independent() -> None:
    logits = LOGITS[:4] / 2
    probabilities = torch.softmax(logits.double(), 0).tolist()
    pairs = {(a, b): probabilities[a] * probabilities[b] for a in range(4) for b in range(4)}

    def draw(seed: int, sequence: int, position: int) -> int:
        return choose_token(logits, [], SamplingParams(temperature=1.0, seed=seed), sequence, position)

    next_position = [(draw(9, 0, 2 * i), draw(9, 0, 2 * i + 1)) for i in range(5000)]
    next_sequence = [(draw(9, 2 * i, 5), draw(9, 2 * i + 1, 5)) for i in range(5000)]
    next_seed = [(draw(2 * i, 0, 5), draw(2 * i + 1, 0, 5)) for i in range(5000)]
    for outcomes in (next_position, next_sequence, next_seed):
        assert chance_of(outcomes, pairs) > FALSE_FAIL_RATE


@pytest.mark.sample(0)
def test_the_chi_square_catches_wrong_samplers() -> None:
    params = COMBINATIONS["hot top-k"]
    expected = exact(params)
    one_noise_for_all_positions = [choose_token(LOGITS, HISTORY, params, 0, 0) for _ in range(100)]
    temperature_ignored = draws(params.changed(temperature=1.0), 5000)
    filter_ignored = draws(params.changed(top_k=0), 5000)
    penalty_ignored = draws(COMBINATIONS["min-p penalty"].changed(repeat_penalty=1.0), 5000)
    assert chance_of(one_noise_for_all_positions, expected) < FALSE_FAIL_RATE
    assert chance_of(temperature_ignored, expected) < FALSE_FAIL_RATE
    assert chance_of(filter_ignored, expected) < FALSE_FAIL_RATE
    assert chance_of(penalty_ignored, exact(COMBINATIONS["min-p penalty"])) < FALSE_FAIL_RATE


def test_the_exact_distribution_is_that_of_two_other_implementations() -> None:
    generator = torch.Generator().manual_seed(11)
    choices: dict[str, list[float]] = {
        "temperature": [0.2, 0.7, 1.0, 3.0],
        "top_k": [0, 1, 2, 7, 16, 100],
        "top_p": [0.01, 0.5, 0.9, 0.999, 1.0],
        "min_p": [0.0, 0.01, 0.3, 1.0],
        "repeat_penalty": [0.5, 1.0, 1.2, 5.0],
    }
    for _ in range(300):
        picked = {
            name: values[int(torch.randint(len(values), (), generator=generator))] for name, values in choices.items()
        }
        params = SamplingParams(**picked)  # type: ignore[arg-type]
        logits = torch.randn(VOCABULARY, generator=generator) * 3
        history = torch.randint(VOCABULARY, (6,), generator=generator).tolist()
        ours = filtered_probabilities(logits, history, params)
        assert torch.allclose(ours, torch.tensor(slow_probabilities(logits, history, params)).double(), atol=1e-6)
        assert torch.allclose(ours, their_probabilities(logits, history, params), atol=1e-6)


def test_the_best_token_always_stays() -> None:
    for params in (
        SamplingParams(temperature=1.0, top_p=5e-324),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=5e-324, top_k=3, top_p=0.5, min_p=0.5),
    ):
        best = int(LOGITS.argmax())
        assert filtered_probabilities(LOGITS, [], params)[best] == 1
        assert choose_token(LOGITS, [], params, 0, 0) == best


def test_greedy_takes_the_likeliest_and_the_lowest_id_wins_a_tie() -> None:
    greedy = SamplingParams()
    assert choose_token(LOGITS, [], greedy, 0, 0) == int(LOGITS.argmax())
    assert choose_token(torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]), [], greedy, 0, 0) == 1
    assert choose_token(torch.zeros(3000), [], greedy, 0, 0) == 0
    assert choose_token(torch.tensor([2.0, 1.9]), [0], greedy.changed(repeat_penalty=2.0), 0, 0) == 1
    assert choose_token(torch.tensor([-1.0, -1.1]), [0], greedy.changed(repeat_penalty=2.0), 0, 0) == 1
    assert choose_token(torch.tensor([2.0, 1.9]), [0], greedy.changed(temperature=-0.0), 0, 0) == 0


def test_presence_and_frequency_count_the_text_alone() -> None:
    logits, history = torch.zeros(5), [0, 0, 1, 2, 2, 2, 3]
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=-0.25)
    for n_prompt_tokens, counts in ((2, [0, 1, 3, 1, 0]), (0, [2, 1, 3, 1, 0]), (7, [0] * 5)):
        added = torch.tensor([0.25 * count - 0.5 * (count > 0) for count in counts]).double()
        found = torch.softmax(filtered_scores(logits, history, params, n_prompt_tokens), 0)
        assert torch.allclose(found, torch.softmax(added, 0), atol=1e-6)


def test_penalties_and_bias_are_the_definitions() -> None:
    params = SamplingParams(
        temperature=0.7, repeat_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5, logit_bias={2: 3, 9: -100}
    )  # type: ignore[arg-type]
    expected = LOGITS.clone()
    for token_id in set(HISTORY):
        expected[token_id] *= 1 / 1.5 if expected[token_id] > 0 else 1.5
    for token_id in set(HISTORY[1:]):
        expected[token_id] -= -1.0 + 0.5 * HISTORY[1:].count(token_id)
    expected[2] += 3
    expected[9] -= 100
    found = torch.softmax(filtered_scores(LOGITS, HISTORY, params, 1), 0)
    assert torch.allclose(found, torch.softmax(expected.double() / 0.7, 0), atol=1e-6)
    greedy = params.changed(temperature=0)
    assert choose_token(LOGITS, HISTORY, greedy, 0, 5, n_prompt_tokens=1) == int(expected.argmax())
    assert greedy.changes_logits and greedy == replace(greedy)


def test_a_bias_of_a_token_that_the_model_lacks_is_refused() -> None:
    params = SamplingParams().changed(logit_bias=[(1, 2.0), [15, -1.0]])  # type: ignore[list-item]
    assert params.logit_bias == ((1, 2.0), (15, -1.0))
    params.require_known(16)
    with pytest.raises(UsageError, match=r"^logit_bias token is 15; expected a whole number from 0 to 14"):
        params.require_known(15)


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids() -> None:
    probabilities = filtered_probabilities(torch.zeros(8), [], SamplingParams(temperature=1.0, top_k=3))
    assert probabilities.tolist() == pytest.approx([1 / 3] * 3 + [0.0] * 5)


def test_logits_are_not_changed() -> None:
    logits = LOGITS.clone()
    choose_token(logits, HISTORY, COMBINATIONS["all"], 0, 0)
    assert torch.equal(logits, LOGITS)


def test_noise_depends_on_seed_sequence_and_position_alone() -> None:
    noise = gumbel_noise(64, 5, 6, 7)
    gumbel_noise(999, 1, 2, 3)
    assert torch.equal(gumbel_noise(64, 5, 6, 7), noise)
    assert torch.equal(gumbel_noise(1000, 5, 6, 7)[:64], noise)  # a larger vocabulary shares the lower ids' noise
    numbers = [0, 1, 2, 255, 256, 2**31, 2**32, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
    places = {(seed, 0, 0) for seed in numbers} | {(0, n, 0) for n in numbers[:6]} | {(0, 0, n) for n in numbers[:6]}
    assert len({tuple(gumbel_noise(4, *place).tolist()) for place in places}) == len(places)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["plain", "all", "greedy"])
def test_logits_that_are_not_finite_are_refused(name: str, value: float) -> None:
    logits = LOGITS.clone()
    logits[5] = value
    with pytest.raises(HeteroError, match=r"logits at position 17 are not finite"):
        choose_token(logits, HISTORY, COMBINATIONS.get(name, SamplingParams()), 0, 17)


def test_noise_is_that_of_the_first_version() -> None:
    golden = {
        (0, 0, 0): [-1.49545161157695, -0.3511371183614868, -0.7859067841514997, 0.5586754626449686],
        (42, 1, 1000): [-0.3484208805512799, -0.25214680447813986, 0.3936659530257966, 4.84828779753487],
        (2**64 - 1, 3, 7): [0.8035049776891193, 2.729152509568153, 1.2550760561807277, 0.12142193377523892],
    }
    for place, values in golden.items():
        assert gumbel_noise(4, *place).tolist() == pytest.approx(values, rel=1e-12)


def test_noise_is_finite_and_standard_gumbel() -> None:
    noise = gumbel_noise(1_000_000, 3, 0, 0)
    assert torch.isfinite(noise).all()
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=0.01)  # Euler's constant
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_the_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    class Extreme:
        def __init__(self, **_: Any) -> None: ...

        def random_raw(self, _n: int) -> Any:
            return np.array([0, 2**64 - 1], np.uint64)

    monkeypatch.setattr(np.random, "Philox", Extreme)
    assert torch.isfinite(gumbel_noise(2, 0, 0, 0)).all()


NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, "1", None, True, [1], 1j, 10**400, 10**5000, -(10**400)]
IMPOSSIBLE: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 2**31 + 1, 1.0, "1", True, math.nan],
    "temperature": [*NO_NUMBERS, -1, -1e-9, 101],
    "top_k": [*NO_NUMBERS, -1, 1.5, 2**31 + 1],
    "top_p": [*NO_NUMBERS, 0, -0.5, 1.0001],
    "min_p": [*NO_NUMBERS, -0.1, 1.1],
    "repeat_penalty": [*NO_NUMBERS, 0, -1, 1e-300, 101],
    "seed": [*NO_NUMBERS, -1, 2**64, 1.0],
    "stop": [None, 5, ("",), ("a", 5), ("x" * 1001,), tuple("ab" * 33), b"ab", {"a": 1}],
    "stop_token_ids": [None, 5, "5", (-1,), (1.0,), (True,), ("a",), (2**40,)],
    "ignore_eos": [None, 1, 0, "false"],
    "presence_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "logit_bias": [
        *[None, 5, "5", (5,), ((5,),), ("ab",)],
        *[{each: 1.0} for each in ("5", -1, 1.0, True, None, 2**40, 10**5000)],
        *[{5: each} for each in [*NO_NUMBERS, -100.1, 101]],
    ],
    "logprobs": [*(each for each in NO_NUMBERS if each is not None), -1, 21, 1.0],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(name: str) -> None:
    for value in IMPOSSIBLE[name]:
        with pytest.raises(UsageError) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value).startswith(name)
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_possible_extremes_are_taken() -> None:
    SamplingParams(max_new_tokens=1, temperature=100, top_k=2**31, top_p=1, min_p=1, repeat_penalty=0.01, seed=0)
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a"], stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_changed_refuses_unknown_names() -> None:
    assert SamplingParams(seed=3).changed(top_k=4) == SamplingParams(seed=3, top_k=4)
    with pytest.raises(UsageError, match=r"'temprature' is not a sampling parameter.*temperature"):
        SamplingParams().changed(temprature=1.0)


def test_from_hf_reads_dicts_and_generation_configs() -> None:
    values: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 12,
        "stop_strings": ["END"],
    }
    expected = SamplingParams(12, 0.6, 20, 0.95, 0.05, 1.1, stop=("END",))
    assert SamplingParams.from_hf(values) == expected
    assert SamplingParams.from_hf(transformers.GenerationConfig(**values)) == expected
    assert SamplingParams.from_hf(values | {"stop_strings": "END"}) == expected


def test_from_hf_without_do_sample_is_greedy() -> None:
    ignored: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}
    for do_sample in ({}, {"do_sample": False}, {"do_sample": None}):
        assert SamplingParams.from_hf(ignored | do_sample) == SamplingParams(repeat_penalty=1.5)


@pytest.mark.parametrize(("theirs", "ours"), [(-1, 0), (-1.0, 0), (0, 0), (20.0, 20), (20, 20)])
def test_from_hf_takes_top_k_as_files_have_it(theirs: float, ours: int) -> None:
    top_k = SamplingParams.from_hf({"do_sample": True, "top_k": theirs}).top_k
    assert top_k == ours and type(top_k) is int


def test_from_hf_takes_none_for_unset() -> None:
    unset = dict.fromkeys(
        ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "stop_strings"]
    )
    assert SamplingParams.from_hf(unset) == SamplingParams()
    assert SamplingParams.from_hf(unset | {"do_sample": True}) == SamplingParams(temperature=1.0)
    assert SamplingParams.from_hf(transformers.GenerationConfig()) == SamplingParams()
    assert SamplingParams.from_hf({}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", {"do_sample": True, "temperature": "hot"}),
        ("temperature", {"do_sample": True, "temperature": math.nan}),
        ("top_k", {"do_sample": True, "top_k": 1.5}),
        ("repeat_penalty", {"repetition_penalty": 0}),
        ("max_new_tokens", {"max_new_tokens": -5}),
        ("stop", {"stop_strings": 5}),
        ("stop", {"stop_strings": [5]}),
        ("do_sample", {"do_sample": "false"}),
    ],
)
def test_from_hf_refuses_nonsense(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams.from_hf(values)
