"""How many passes are timed, and of how many rows: what is given up where seconds are short, and in which order."""

import pytest

from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.profiling.preset import (
    CHUNKS_SHARE,
    FULL,
    LEAST_PASSES,
    LEAST_TOKENS,
    MOST_PASSES,
    QUICK,
    USUAL_PASSES,
    PassSampling,
    affordable_points,
    attention_points,
)

ROW_S, POSITION_S = 1e-3, 1e-6  # of a chunk's pass


def pass_s(m: int, context_tokens: int) -> float:
    return m * (ROW_S + POSITION_S * context_tokens)


def n_passes(sampling: PassSampling, each_s: float) -> int:
    n = 0
    while sampling.goes_on(n, n * each_s):
        n += 1
    return n


@pytest.mark.parametrize(
    "each_s, limit_s, expected",
    [
        (0.001, 9.0, MOST_PASSES),  # for all of its time
        (0.02, 9.0, 50),
        (0.02, 0.5, 25),  # its share is smaller
        (1.5, 9.0, USUAL_PASSES),  # longer than its time, and still in its share
        (1.5, 5.0, 3),
        (1.5, 0.0, LEAST_PASSES),
        (1.5, -1.0, LEAST_PASSES),
    ],
)
def test_passes_at_a_point(each_s: float, limit_s: float, expected: int) -> None:
    assert n_passes(PassSampling(1.0, limit_s), each_s) == expected


@pytest.mark.parametrize("preset", [QUICK, FULL])
def test_what_is_given_up_of_chunks_and_in_which_order(preset: object) -> None:
    points = attention_points(preset)  # type: ignore[arg-type]
    few = [point for point in points if point[0] <= MAX_DECODE_TOKENS]
    seen: list[tuple[int, bool]] = []  # the most rows, and whether there are chunks behind a context
    left_s = 2000.0
    while left_s > 1e-3:
        found, least_s = affordable_points(points, pass_s, left_s)
        chunks = [point for point in found if point[0] > MAX_DECODE_TOKENS]
        assert [point for point in found if point[0] <= MAX_DECODE_TOKENS] == few
        assert least_s == pytest.approx((1 + LEAST_PASSES) * sum(pass_s(*point) for point in chunks))
        n_rows, is_behind = max(m for m, _ in chunks), any(m < tokens for m, tokens in chunks)
        assert least_s <= CHUNKS_SHARE * left_s or (n_rows, is_behind) == (LEAST_TOKENS, False)
        assert (n_rows, n_rows) in chunks  # what a context adds is seen beside a chunk without
        if (n_rows, is_behind) not in seen:
            seen.append((n_rows, is_behind))
        left_s /= 1.1
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == (max(m for m, _ in points), True) and seen[-2:] == [(LEAST_TOKENS, True), (LEAST_TOKENS, False)]


def test_with_time_enough_every_point_is_as_asked_for() -> None:
    points = attention_points(FULL)
    assert affordable_points(points, pass_s, 1e9)[0] == points


def test_points_without_chunks_are_left_as_they_are() -> None:
    assert affordable_points([(1, 16), (4, 16)], pass_s, 0.0) == ([(1, 16), (4, 16)], 0)
