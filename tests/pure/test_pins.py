"""The options that make a plan again: exact, short, and read back to the byte."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.planning.reports.pins import GIB, gib, numbers_pattern


@given(st.sets(st.integers(0, 200), min_size=1, max_size=40))
def test_a_pattern_matches_its_numbers_alone(numbers: set[int]) -> None:
    pattern = numbers_pattern(sorted(numbers))
    assert {n for n in range(2500) if re.fullmatch(pattern, str(n))} == numbers


@given(st.integers(0, 130), st.integers(0, 130))
def test_runs_are_short(first: int, more: int) -> None:
    pattern = numbers_pattern(range(first, first + more + 1))
    assert {n for n in range(2500) if re.fullmatch(pattern, str(n))} == set(range(first, first + more + 1))
    assert len(pattern) <= 40


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        (range(16), r"(\d|1[0-5])"),
        (range(7, 32), r"([7-9]|[12]\d|3[01])"),
        (range(80), r"(\d|[1-7]\d)"),
        ([3], "3"),
        ([0, 1, 5], "([01]|5)"),
        (range(95, 126), r"(9[5-9]|1[01]\d|12[0-5])"),
    ],
)
def test_patterns_read_as_one_would_write_them(numbers: range | list[int], pattern: str) -> None:
    assert numbers_pattern(list(numbers)) == pattern


@given(st.integers(0, 2**45))
def test_budgets_parse_back_to_the_byte(n_bytes: int) -> None:
    text = gib(n_bytes)
    assert int(float(text) * GIB) == n_bytes


def test_round_budgets_are_short() -> None:
    assert [gib(n) for n in (0, 4 * GIB, GIB * 5 // 2, int(6.44 * GIB))] == ["0", "4", "2.5", "6.44"]
