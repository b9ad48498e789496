"""The placement of a chain against the exact optimum of a mixed-integer programme."""

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest

from hetero_ee.planning.chain import Option, chain_bytes, chain_s, place_chain

N_INSTANCES = 1000


def random_chain(seed: int) -> tuple[list[dict[str, Option]], int, float, bool]:
    """Parts of a few sizes or all different, with pins now and then; a budget from nothing to everything."""
    draw = random.Random(seed)
    n_parts = draw.randint(1, 24)
    alike = draw.random() < 0.5
    kinds = [_part(draw) for _ in range(2)]
    parts = [dict(kinds[i % 2]) if alike else _part(draw) for i in range(n_parts)]
    for part in parts:
        if draw.random() < 0.05:
            kept = draw.choice(list(part))
            for name in set(part) - {kept}:
                del part[name]
    total = sum(max(option.gpu_bytes for option in part.values()) for part in parts)
    transfer_s = draw.choice([0.0, 1e-5, 1e-3, 5e-3])
    return parts, int(total * draw.random()), transfer_s, draw.random() < 0.5


def _part(draw: random.Random) -> dict[str, Option]:
    n_bytes, kv_bytes = draw.randint(10**7, 10**9), draw.choice([0, draw.randint(0, 10**8)])
    cpu_s = n_bytes / 4e10 * draw.uniform(0.7, 1.5)
    gpu_s = cpu_s * draw.uniform(0.05, 1.2)
    return {
        "gpu": Option(gpu_s, n_bytes + kv_bytes, on_gpu=True),
        "stream": Option(max(gpu_s, n_bytes / 1.5e10), kv_bytes, on_gpu=True),
        "cpu": Option(cpu_s, 0, on_gpu=False),
    }


def optimum(parts: list[dict[str, Option]], budget: int, transfer_s: float, ends_on_gpu: bool) -> float | None:
    """Least seconds by HiGHS: a variable for each place of each part, and one for each possible transfer."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    places = [(i, option) for i, part in enumerate(parts) for option in part.values()]
    n, m = len(places), len(parts) + 1
    cost = np.array([*(option.seconds for _, option in places), *[transfer_s] * m])
    rows: list[Any] = []
    low, high = [], []

    def require(row: Any, at_least: float, at_most: float) -> None:
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    for i in range(len(parts)):
        require([*(float(j == i) for j, _ in places), *[0.0] * m], 1, 1)
    require([*(option.gpu_bytes / 1e6 for _, option in places), *[0.0] * m], 0, budget / 1e6)
    for i in range(m):  # transfer i lies before part i; rows begin on the CPU
        after = [float(j == i and option.on_gpu) for j, option in places]
        before = [float(j == i - 1 and option.on_gpu) for j, option in places]
        end = float(ends_on_gpu) if i == len(parts) else 0.0
        transfer = [float(k == i) for k in range(m)]
        difference = np.array(after) - np.array(before)
        require([*-difference, *transfer], end, np.inf)
        require([*difference, *transfer], -end, np.inf)
    integral = np.array([1] * n + [0] * m)
    found = milp(
        cost, constraints=LinearConstraint(np.array(rows), low, high), integrality=integral, bounds=Bounds(0, 1)
    )
    return None if found.status == 2 else float(found.fun)


def assert_near_optimum(seed: int) -> None:
    parts, budget, transfer_s, ends_on_gpu = random_chain(seed)
    places, least = place_chain(parts, budget, transfer_s, ends_on_gpu=ends_on_gpu), optimum(*random_chain(seed))
    if places is None or least is None:
        assert places is None and least is None, seed
        return
    assert chain_bytes(parts, places) <= budget
    assert chain_s(parts, places, transfer_s, ends_on_gpu=ends_on_gpu) <= 1.01 * least + 1e-9, seed


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_within_a_hundredth_of_the_optimum(first: int) -> None:
    for seed in range(first, first + 25):
        assert_near_optimum(seed)


@pytest.mark.slow
def test_within_a_hundredth_of_the_optimum_in_each_of_a_thousand() -> None:
    for seed in range(N_INSTANCES):
        assert_near_optimum(seed)


def test_small_chains_by_trying_everything() -> None:
    for seed in range(200):
        parts, budget, transfer_s, ends_on_gpu = random_chain(seed)
        parts = parts[:4]
        tried = [
            chain_s(parts, places, transfer_s, ends_on_gpu=ends_on_gpu)
            for places in itertools.product(*parts)
            if chain_bytes(parts, places) <= budget
        ]
        found = place_chain(parts, budget, transfer_s, ends_on_gpu=ends_on_gpu)
        assert (found is None) == (not tried)
        if found is not None:
            assert chain_s(parts, found, transfer_s, ends_on_gpu=ends_on_gpu) <= 1.01 * min(tried) + 1e-9


def test_a_crossing_that_costs_too_much_is_not_made() -> None:
    part = {"gpu": Option(1.0, 1, on_gpu=True), "cpu": Option(1.5, 0, on_gpu=False)}
    assert place_chain([part] * 3, 3, 0.1, ends_on_gpu=False) == ("gpu",) * 3
    assert place_chain([part] * 3, 3, 2.0, ends_on_gpu=False) == ("cpu",) * 3
    assert place_chain([part] * 3, 1, 0.1, ends_on_gpu=True) == ("cpu", "cpu", "gpu")


def test_what_cannot_fit_is_none() -> None:
    assert place_chain([{"gpu": Option(1.0, 11, on_gpu=True)}], 10, 0.0, ends_on_gpu=False) is None


@pytest.mark.slow
def test_eighty_layers_take_less_than_a_tenth_of_a_second() -> None:
    draw = random.Random(0)
    kinds = [_part(draw), _part(draw)]
    parts = [kinds[i % 2] for i in range(160)]
    budget = 80 * (kinds[0]["gpu"].gpu_bytes + kinds[1]["gpu"].gpu_bytes) // 2
    times = []
    for _ in range(5):
        start = time.perf_counter()
        place_chain(parts, budget, 1e-5, ends_on_gpu=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1
