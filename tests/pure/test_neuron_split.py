"""Split FFNs against everything tried and against the exact optimum of a mixed-integer programme."""

import itertools
import random
from typing import Any

import numpy as np
import pytest

from hetero_ee.planning.neuron_split import SplitTimes, place_split_chain
from hetero_ee.planning.placement import Option
from hetero_ee.planning.times.costs import SPLIT

N_INSTANCES = 1000
Instance = tuple[list[dict[str, Option]], dict[int, SplitTimes], int, float, bool]


def random_instance(seed: int, n_layers: int, most_blocks: int, piece_bytes: int = 2**21) -> Instance:
    """Attention and FFN of each layer; frequencies from even to steep; a budget from nothing to everything."""
    draw = random.Random(seed)
    parts: list[dict[str, Option]] = []
    splits = {}
    slower, transfer_s = draw.uniform(2, 40), draw.choice([0.0, 1e-5, 1e-4, 1e-3])
    for layer in range(n_layers):
        n_blocks, block_bytes = draw.randint(2, most_blocks), piece_bytes * draw.uniform(0.2, 9)
        taken = -(-block_bytes * np.arange(n_blocks + 1) // piece_bytes) * piece_bytes
        for n_bytes in (piece_bytes * draw.randint(5, 60), int(taken[-1])):
            gpu_s = n_bytes / piece_bytes * 2e-6
            parts.append({"gpu": Option(gpu_s, n_bytes, True), "cpu": Option(gpu_s * slower, 0, False)})
        ffn = parts[-1]
        steepness = draw.choice([0.0, 1.0, 4.0])
        active = np.sort([draw.random() ** steepness for _ in range(n_blocks)])[::-1]
        behind = np.concatenate([np.cumsum(active[::-1])[::-1], [0.0]]) / n_blocks
        share = np.arange(n_blocks + 1) / n_blocks
        both = np.maximum(ffn["gpu"].seconds * share, ffn["cpu"].seconds * behind)
        splits[2 * layer + 1] = SplitTimes(both + 2 * transfer_s, taken.astype(np.int64))
    total = sum(part["gpu"].gpu_bytes for part in parts)
    return parts, splits, int(total * draw.random()), transfer_s, draw.random() < 0.8


def choices(parts: list[dict[str, Option]], splits: dict[int, SplitTimes]) -> list[list[Option]]:
    """Every place of every part, every number of blocks apart."""
    found = []
    for index, part in enumerate(parts):
        times = splits.get(index)
        sizes = range(1, len(times.seconds)) if times else ()
        found.append(
            [*part.values(), *(Option(float(times.seconds[n]), int(times.gpu_bytes[n]), None) for n in sizes)]  # type: ignore[union-attr]
        )
    return found


def seconds_of(chosen: list[Option], transfer_s: float, ends_on_gpu: bool) -> float:
    """By the rule in words: rows begin on the CPU, a change of device is a transfer, a part on both hides none."""
    seconds, device = 0.0, False
    known: bool | None = device
    for option in chosen:
        seconds += option.seconds
        if option.on_gpu is None:
            known = None
            continue
        seconds += transfer_s * (known is not None and known != option.on_gpu)
        known = option.on_gpu
    return seconds + transfer_s * (known is not None and known != ends_on_gpu)


def chosen_of(instance: Instance) -> list[Option]:
    parts, splits, budget, transfer_s, ends_on_gpu = instance
    found = place_split_chain(parts, splits, budget, transfer_s, ends_on_gpu=ends_on_gpu)
    assert found is not None and {i for i, placement in enumerate(found.placements) if placement == SPLIT} == set(
        found.n_blocks
    )
    chosen = []
    for index, (part, placement) in enumerate(zip(parts, found.placements, strict=True)):
        if placement == SPLIT:
            times, n = splits[index], found.n_blocks[index]
            assert 1 <= n < len(times.seconds)
            chosen.append(Option(float(times.seconds[n]), int(times.gpu_bytes[n]), None))
        else:
            chosen.append(part[placement])
    assert sum(option.gpu_bytes for option in chosen) <= budget
    return chosen


@pytest.mark.parametrize("seed", range(60))
def test_tiny_chains_are_exactly_the_best_of_all(seed: int) -> None:
    instance = random_instance(seed, n_layers=2, most_blocks=5, piece_bytes=1)
    parts, splits, budget, transfer_s, ends_on_gpu = instance
    least = min(
        seconds_of(list(chosen), transfer_s, ends_on_gpu)
        for chosen in itertools.product(*choices(parts, splits))
        if sum(option.gpu_bytes for option in chosen) <= budget
    )
    assert seconds_of(chosen_of(instance), transfer_s, ends_on_gpu) == pytest.approx(least, rel=2e-3)


def optimum(instance: Instance) -> float:
    """Least seconds by HiGHS: a variable for each choice, and one for each possible transfer."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    parts, splits, budget, transfer_s, ends_on_gpu = instance
    places = [(i, option) for i, each in enumerate(choices(parts, splits)) for option in each]
    m = len(parts) + 1
    cost = np.array([*(option.seconds for _, option in places), *[transfer_s] * m]) * 1e3
    rows: list[Any] = [[*(float(j == i) for j, _ in places), *[0.0] * m] for i in range(len(parts))]
    low, high = [1.0] * len(parts), [1.0] * len(parts)
    rows.append([*(option.gpu_bytes / 1e6 for _, option in places), *[0.0] * m])
    low.append(0.0)
    high.append(budget / 1e6)
    for i in range(m):  # transfer i lies before part i, where one of the two is on one device and one on the other
        transfer = [float(k == i) for k in range(m)]
        for device in (True, False):
            before = [float(j == i - 1 and option.on_gpu is (not device)) for j, option in places]
            after = [float(j == i and option.on_gpu is device) for j, option in places]
            fixed = float(i == 0 and device) + float(i == len(parts) and ends_on_gpu is device)
            rows.append([*-(np.array(before) + np.array(after)), *transfer])
            low.append(fixed - 1)
            high.append(np.inf)
    found = milp(
        cost,
        constraints=LinearConstraint(csr_array(np.array(rows)), low, high),
        integrality=np.array([1] * len(places) + [0] * m),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-4},
    )
    assert found.status == 0
    return float(found.fun) / 1e3


def assert_near_optimum(seed: int) -> None:
    is_large = seed % 40 == 39
    n_layers, most_blocks = (20 + seed % 17, 100) if is_large else (1 + seed % 10, 24)
    instance = random_instance(seed, n_layers, most_blocks)
    found = seconds_of(chosen_of(instance), *instance[3:])
    assert found <= 1.01 * optimum(instance), seed


@pytest.mark.few(2)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_within_a_hundredth_of_the_optimum(first: int) -> None:
    for seed in range(first, first + 50):
        assert_near_optimum(seed)


@pytest.mark.slow
def test_within_a_hundredth_of_the_optimum_in_each_of_a_thousand() -> None:
    for seed in range(N_INSTANCES):
        assert_near_optimum(seed)
