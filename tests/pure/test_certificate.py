"""Certificates: thresholds that keep what they promise, over many draws of prompts; and what is refused."""

import math
from typing import Any

import numpy as np
import pytest

from hetero_ee.errors import UsageError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.speculation.exits.calibration import NO_EXIT
from hetero_ee.speculation.exits.certificate import (
    DELTA,
    N_LEVELS,
    Certificate,
    check_sampling,
    level_confidence,
    levels_of,
)
from hetero_ee.speculation.exits.risk_bound import log_purse, risk_bound
from tests.certificates import mean_loss, part_of, some_certificate

N_SPLITS = 200
RISKS = (0.01, 0.02, 0.05)
SETS = ((1,), (3,), (1, 2, 3))


@pytest.mark.parametrize("exit_layers", SETS)
def test_share_loss_and_threshold_are_those_of_single_tokens(exit_layers: tuple[int, ...]) -> None:
    whole = some_certificate(200)
    found = whole.certified_exit(exit_layers, 0.2)
    assert 0 < found.threshold < 1 and found.realised == pytest.approx(mean_loss(whole, exit_layers, found.threshold))
    assert found.realised < found.bound <= 0.2
    columns = [whole.exit_layers.index(each) for each in exit_layers]
    opens = [level_confidence(level) >= found.threshold for level in range(N_LEVELS)]
    reached = np.array(opens)[whole.judgements[:, columns] >> 1]
    first = np.where(reached.any(1), reached.argmax(1), len(columns))
    expected = np.bincount(first, minlength=len(columns) + 1)[:-1] / len(first)
    np.testing.assert_allclose(found.shares, expected)
    next_level = int(levels_of(np.array([found.threshold]))[0]) - 1
    assert mean_loss(whole, exit_layers, level_confidence(next_level)) >= found.realised


@pytest.mark.parametrize("risk", RISKS)
@pytest.mark.sample(0)
def test_the_promise_holds_over_draws_of_prompts(risk: float) -> None:
    """Prompts of 20,000, drawn 200 times: that any set of exit layers breaks its promise is rarer than delta."""
    population = some_certificate(20_000, seed=5, most_tokens=12)
    random = np.random.default_rng(6)
    true_risk = {each: mean_by_level(population, each) for each in SETS}
    broken, shares = 0, []
    for _ in range(N_SPLITS):
        drawn = part_of(population, random.choice(20_000, 1500, replace=True))
        found = [drawn.certified_exit(each, risk) for each in SETS]
        levels = [int(levels_of(np.array([min(1.0, each.threshold)]))[0]) for each in found]
        broken += any(true_risk[s][level] > risk for s, level in zip(SETS, levels, strict=True))
        shares.append(sum(found[1].shares))
    assert broken <= DELTA * N_SPLITS
    assert np.mean(shares) > 0.05 or risk < 0.02  # and not by letting nothing exit


def mean_by_level(population: Certificate, exit_layers: tuple[int, ...]) -> np.ndarray:
    wrong, _ = population._by_level([population.exit_layers.index(each) for each in exit_layers])
    return np.asarray((wrong / population.n_tokens).mean(1))


@pytest.mark.parametrize("mean", [0.002, 0.05])
@pytest.mark.parametrize("kind", ["all or nothing", "mostly small", "mostly zero"])
def test_the_bound_holds_for_losses_of_any_kind(kind: str, mean: float) -> None:
    random, n_runs, n, delta = np.random.default_rng(3), 400, 500, 0.05
    draw = {
        "all or nothing": lambda: random.random(n) < mean,
        "mostly small": lambda: random.beta(1, 1 / mean - 1, n),
        "mostly zero": lambda: (random.random(n) < 2 * mean) * random.random(n),
    }[kind]
    broken = sum(risk_bound(draw().astype(np.float64), delta) < mean for _ in range(n_runs))
    assert broken <= delta * n_runs


def test_without_losses_it_is_nearly_the_exact_binomial_bound() -> None:
    for n in (10, 300, 1500):
        exact = 1 - 0.05 ** (1 / n)
        assert exact < risk_bound(np.zeros(n), 0.05) < 1.5 * exact + 0.001


def test_it_is_tighter_than_hoeffding_and_bentkus_for_shares_of_a_text() -> None:
    from scipy.stats import binom

    losses = np.random.default_rng(4).binomial(64, 0.04, 1500) / 64
    risk, n = 0.05, 1500
    divergence = sum(a * math.log(a / b) for a, b in ((losses.mean(), risk), (1 - losses.mean(), 1 - risk)))
    bentkus = math.e * binom.cdf(math.ceil(n * losses.mean()), n, risk)
    assert -log_purse(losses, risk) < math.log(min(math.exp(-n * divergence), bentkus)) - 5


def test_the_purse_does_not_depend_on_the_prompts_order() -> None:
    whole = some_certificate(300)
    turned = part_of(whole, np.arange(300)[::-1])
    assert whole.certified_exit((2,), 0.1).threshold == turned.certified_exit((2,), 0.1).threshold


def test_a_level_is_the_last_that_a_confidence_reaches() -> None:
    for level in range(1, N_LEVELS):
        least = level_confidence(level)
        assert levels_of(np.array([least, np.nextafter(least, 0)])).tolist() == [level, level - 1]
    assert levels_of(np.array([math.nan, 0.0, -1.0, 1.0])).tolist() == [0, 0, 0, N_LEVELS - 1]


def test_an_exit_that_is_always_wrong_is_never_taken() -> None:
    whole = some_certificate(400, 1)
    wrong = Certificate(*known(whole), np.full_like(whole.judgements, 2 * (N_LEVELS - 1)))
    found = wrong.certified_exit((1,), 0.3)
    assert found.threshold == NO_EXIT and found.shares == (0.0,)


def test_texts_that_ended_at_once_lose_nothing() -> None:
    whole = some_certificate(300)
    lengths = np.append(whole.n_tokens, np.zeros(300, np.uint16))
    head = whole.key, whole.exits_digest, whole.kv_type, whole.text, whole.exit_layers
    more = Certificate(*head, np.tile(whole.prompt_lengths, 2), lengths, whole.judgements)
    found = more.certified_exit((2,), 0.1)
    assert found.realised == pytest.approx(mean_loss(more, (2,), found.threshold))
    assert found.threshold < whole.certified_exit((2,), 0.1).threshold


def known(whole: Certificate) -> tuple[Any, ...]:
    """All but the judgements."""
    head = whole.key, whole.exits_digest, whole.kv_type, whole.text, whole.exit_layers
    return *head, whole.prompt_lengths, whole.n_tokens


@pytest.mark.parametrize("risk", [0, 1, -0.1, 1.5, math.nan, math.inf, True, "0.05", None])
def test_a_risk_out_of_range_is_refused(risk: Any) -> None:
    with pytest.raises(UsageError, match=r"risk is .*; expected a number between 0 and 1"):
        some_certificate().certified_exit((1,), risk)


def test_a_risk_too_small_for_so_many_prompts_says_what_is_not() -> None:
    whole = some_certificate(300)
    with pytest.raises(UsageError, match=r"300 prompts can't certify less than 0\.0\d+") as refused:
        whole.certified_exit((1,), 0.001)
    least = float(str(refused.value).split("less than ")[1].split()[0])
    whole.certified_exit((1,), least + 0.0001)


@pytest.mark.parametrize("exit_layers", [(), (0,), (4,), (2, 1), (1, 1)])
def test_exit_layers_that_were_not_judged_are_refused(exit_layers: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="expected some of 1 to 3, ascending"):
        some_certificate().certified_exit(exit_layers, 0.1)


@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"repeat_penalty": 1.1}, {"logit_bias": {3: 1}}])
def test_sampling_that_was_not_certified_is_refused(changes: dict[str, Any]) -> None:
    check_sampling(SamplingParams(seed=3, max_new_tokens=5))
    with pytest.raises(UsageError, match="of greedy texts"):
        check_sampling(SamplingParams(**changes))


def test_other_keys_and_values_are_refused() -> None:
    some_certificate().require_kv_type("fp16")
    with pytest.raises(UsageError, match="in fp16, not int8"):
        some_certificate().require_kv_type("int8")


def test_other_activations_are_refused() -> None:
    some_certificate().require_activations(1)
    with pytest.raises(UsageError, match="of int8 activations, not int16; choose activations int8, or certify"):
        some_certificate().require_activations(2)


@pytest.mark.parametrize("layers", [(), (0, 1, 2), (1, 3, 2), (1, 2)])
def test_a_record_that_does_not_fit_together_is_refused(layers: tuple[int, ...]) -> None:
    whole = some_certificate()
    with pytest.raises(ValueError, match=r"judgements|ascend"):
        Certificate(*known(whole)[:4], layers, *known(whole)[5:], whole.judgements)
