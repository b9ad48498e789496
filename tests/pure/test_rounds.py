"""Rounds of exact mode by the formula against the same rounds drawn at random."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.planning.statistics import DraftRates
from hetero_ee.planning.times.rounds import ExitRates, Round, chain_round, expected_rounds

N_ROUNDS = 400_000
DRAFT_S, VERIFY_S = 0.3, (1.0, 1.1, 1.3, 1.4, 1.8, 2.0, 2.5, 3.1)


def verify_s(m: int) -> float:
    return VERIFY_S[m - 1]


def drawn_exits(rates: ExitRates, draft_length: int, seed: int) -> Round:
    """Rows exit or don't; drafts are right until the first wrong one."""
    random = np.random.default_rng(seed)
    exits = random.random((N_ROUNDS, draft_length - 1)) < rates.exit_rate
    n_exits = np.cumprod(exits, axis=1).sum(axis=1)
    right = random.random((N_ROUNDS, draft_length - 1)) < rates.precision
    n_right = np.minimum(np.cumprod(right, axis=1).sum(axis=1), n_exits)
    seconds = (n_exits + 1) * DRAFT_S + np.array(VERIFY_S)[n_exits]
    return Round(float(seconds.mean()), float((n_right + 1).mean()), float((n_exits + 1).mean()))


def drawn_chain(acceptance: Sequence[float], n_rows: int, seed: int) -> Round:
    random = np.random.default_rng(seed)
    right = random.random((N_ROUNDS, n_rows - 1)) < np.array(acceptance)[: n_rows - 1]
    tokens = 1 + np.cumprod(right, axis=1).sum(axis=1)
    return Round((n_rows - 1) * DRAFT_S + verify_s(n_rows), float(tokens.mean()), float(n_rows))


def assert_close(found: Round, drawn: Round) -> None:
    assert found.seconds == pytest.approx(drawn.seconds, rel=1e-2)
    assert found.tokens == pytest.approx(drawn.tokens, rel=1e-2)
    assert found.rows == pytest.approx(drawn.rows, rel=1e-2)
    assert found.seconds_per_token == pytest.approx(drawn.seconds_per_token, rel=1e-2)


@pytest.mark.parametrize("rates", [ExitRates(0.5, 0.9), ExitRates(0.9, 0.7), ExitRates(0.2, 0.3), ExitRates(1.0, 0.95)])
def test_exits_as_drawn(rates: ExitRates) -> None:
    rounds = expected_rounds(rates, 8, DRAFT_S, verify_s)
    assert len(rounds) == 8
    for draft_length in (2, 5, 8):
        assert_close(rounds[draft_length - 1], drawn_exits(rates, draft_length, seed=draft_length))


@pytest.mark.parametrize("acceptance", [(0.8,) * 8, (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0), (1.0,) * 8])
def test_chains_as_drawn(acceptance: tuple[float, ...]) -> None:
    rates = DraftRates("drawn", acceptance, DRAFT_S)
    for n_rows in (2, 4, 8):
        assert_close(
            chain_round(n_rows, rates.acceptance_at, DRAFT_S, verify_s), drawn_chain(acceptance, n_rows, seed=n_rows)
        )


@given(st.floats(0, 1), st.integers(1, 16))
def test_even_acceptance_is_a_geometric_sum(acceptance: float, n_rows: int) -> None:
    found = chain_round(n_rows, lambda position: acceptance, 0.5, lambda m: float(m))
    assert found.tokens == pytest.approx(sum(acceptance**j for j in range(n_rows)))
    assert found.seconds == pytest.approx(0.5 * (n_rows - 1) + n_rows)


def test_a_round_of_one_row_is_a_pass() -> None:
    assert chain_round(1, lambda position: 0.5, 9.0, verify_s) == Round(1.0, 1.0, 1.0)
    assert expected_rounds(ExitRates(0.7, 0.7), 1, DRAFT_S, verify_s) == [Round(DRAFT_S + 1.0, 1.0, 1.0)]
