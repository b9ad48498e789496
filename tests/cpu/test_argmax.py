"""Argmax equals NumPy's: the lowest id wins a tie, the first NaN wins a row; chunks and threads change nothing."""

import numpy as np
import pytest

from hetero_ee_cpu_ops.argmax import CHUNK, SHARED_FROM, argmax
from tests.cpu_support import Guarded, assert_same_bits, teams


def tied(rng, m, n):
    """Rows with many equal values, zeros of both signs, infinities, and in one of four cases NaN of both signs."""
    x = rng.integers(-2, 3, (m, n)).astype(np.float32)
    if rng.random() < 0.3:
        x = np.minimum(x, np.float32(0))
    x[(x == 0) & (rng.random((m, n)) < 0.5)] = -0.0
    if rng.random() < 0.2:
        x[rng.random((m, n)) < 2 / n] = np.inf
    if rng.random() < 0.2:
        x[:] = -np.inf
    if rng.random() < 0.25:
        x[rng.random((m, n)) < 1 / n] = np.nan
        x[rng.random((m, n)) < 1 / n] = -np.float32(np.nan)
    return x


def test_equals_numpy_on_ties():
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        m, n = int(rng.integers(1, 18)), int(rng.integers(1, 300))
        x = tied(rng, m, n) if seed % 4 else rng.normal(size=(m, n)).astype(np.float32)
        out = Guarded((m,), np.int64)
        assert argmax(x, out.array) is out.array
        out.check()
        assert_same_bits(out.array, x.argmax(1))


def test_every_single_place_is_found():
    for n in (1, 15, 16, 17, 63, 64, 65, 130):
        x = np.full((n, n), -3e38, np.float32)
        x[np.arange(n), np.arange(n)] = -2.9e38
        assert_same_bits(argmax(x), np.arange(n))


def test_threads_change_nothing():
    with teams() as all_teams:
        for seed in range(24):
            rng = np.random.default_rng(seed)
            n = int(rng.choice([CHUNK - 1, CHUNK, CHUNK + 1, 32_000, SHARED_FROM + 3]))
            m = max(1, int(rng.integers(1, 18)) * CHUNK // n)
            x = tied(rng, m, n) if seed % 2 else rng.normal(size=(m, n)).astype(np.float32)
            for pool in all_teams:
                out = Guarded((m,), np.int64)
                argmax(x, out.array, pool=pool)
                out.check()
                assert_same_bits(out.array, x.argmax(1))


def test_a_tie_across_chunks_goes_to_the_lowest():
    x = np.zeros((1, SHARED_FROM + 100), np.float32)
    places = [7, CHUNK - 1, CHUNK, 3 * CHUNK + 5]
    with teams() as all_teams:
        for first in range(len(places)):
            x[:] = 0
            x[0, places[first:]] = 1
            assert [int(argmax(x, pool=pool)[0]) for pool in [None, *all_teams]] == [places[first]] * 4


def test_wrong_arguments_are_refused():
    x = np.zeros((2, 32), np.float32)
    for bad in (
        lambda: argmax(x.astype(np.float64)),
        lambda: argmax(x[:, ::2]),
        lambda: argmax(x[:, :0].copy()),
        lambda: argmax(x, np.zeros(3, np.int64)),
        lambda: argmax(x, np.zeros(2, np.int32)),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize("bug", ["last of a tie", "tail left out", "NaN ignored", "-0 below +0"])
def test_the_cases_catch(bug):
    """Each mistake, put into the expectation, differs on these cases."""
    differs = False
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = tied(rng, 3, 37)
        if bug == "last of a tie":
            expected = 36 - x[:, ::-1].argmax(1)
        elif bug == "tail left out":
            expected = x[:, :32].argmax(1)
        elif bug == "NaN ignored":
            expected = np.where(np.isnan(x), -np.inf, x).argmax(1)
        else:
            expected = np.where((x == 0) & np.signbit(x), np.float32(-1e-40), x).argmax(1)
        differs |= bool((argmax(x) != expected).any())
    assert differs
