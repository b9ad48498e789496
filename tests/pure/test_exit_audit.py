"""The audit of exits: its false alarms, what it finds, and which exits it looks at."""

import math

import numpy as np
import pytest

from hetero_ee.errors import UsageError
from hetero_ee.speculation.audit import AUDITED_SHARE, FALSE_ALARM, ExitAudit, is_audited


def first_breach(most: float, differs: np.ndarray) -> int | None:
    """After how many audited exits, None for never."""
    audit = ExitAudit(most)
    for number, each in enumerate(differs, start=1):
        audit.observe(bool(each))
        if audit.is_breached:
            return number
    return None


@pytest.mark.parametrize("most", [0.02, 0.1, 0.5])
@pytest.mark.sample(1)
def test_exits_as_certified_rarely_raise_an_alarm(most: float) -> None:
    random = np.random.default_rng(1)
    n_runs = 400
    alarms = sum(first_breach(most, random.random(1000) < most) is not None for _ in range(n_runs))
    assert alarms / n_runs <= FALSE_ALARM + 2 * math.sqrt(FALSE_ALARM / n_runs)


@pytest.mark.parametrize(("most", "share", "n_exits"), [(0.1, 0.2, 600), (0.05, 0.5, 60), (0.02, 0.06, 1200)])
def test_exits_that_differ_more_often_are_found(most: float, share: float, n_exits: int) -> None:
    random = np.random.default_rng(2)
    found = [first_breach(most, random.random(n_exits) < share) for _ in range(50)]
    assert sum(each is not None for each in found) >= 47


def test_a_breach_stays_and_counts_go_on() -> None:
    audit = ExitAudit(0.1)
    for differs in [True] * 5 + [False] * 500:
        audit.observe(differs)
    assert audit.is_breached and (audit.n_audited, audit.n_different) == (505, 5)


@pytest.mark.parametrize("most", [1.0, 1.7, math.inf])
def test_where_all_may_differ_nothing_is_a_breach(most: float) -> None:
    audit = ExitAudit(most)
    for _ in range(2000):
        audit.observe(True)
    assert not audit.is_breached


@pytest.mark.parametrize("most", [0.0, -1.0, math.nan])
def test_an_impossible_share_is_refused(most: float) -> None:
    with pytest.raises(UsageError, match="expected a number above 0"):
        ExitAudit(most)


def test_a_fiftieth_is_audited_the_same_each_time() -> None:
    drawn = [is_audited(seed, sequence, p) for seed in (0, 2**64 - 1) for sequence in range(10) for p in range(1000)]
    assert abs(np.mean(drawn) - AUDITED_SHARE) < 0.004
    assert drawn[:1000] != drawn[1000:2000]
    assert is_audited(1, 2, 3) == is_audited(1, 2, 3)
    assert not is_audited(0, 0, 0, share=0) and is_audited(0, 0, 0, share=1)
