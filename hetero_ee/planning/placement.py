"""Where to put a chain of parts so that one pass through it takes least time within the GPU's memory.

A dynamic programme over the chain, the device that computed the part before, and the memory used so far, in units of a
fraction of the budget; sizes are rounded up to whole units, and what that leaves unused is filled at the end.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GRID_UNITS = 2**13  # 80 layers are 160 parts: rounding up wastes a fiftieth of the budget at most, before the filling
SAME = 1.001  # plans closer than this are alike, and the one with early layers on the GPU is wanted: drafts exit early
GPU, CPU = 1, 0


@dataclass(frozen=True, slots=True)
class Option:
    """One place a part may have: seconds there, bytes of GPU memory it takes, and whether the GPU computes it."""

    seconds: float
    gpu_bytes: int
    on_gpu: bool


PartOptions = Mapping[str, Option]  # by the place's name


def place_chain(
    parts: Sequence[PartOptions], budget_bytes: int, crossing_s: float, *, ends_on_gpu: bool
) -> tuple[str, ...] | None:
    """The places of least total time, rows beginning on the CPU; None where no choice fits the budget."""
    unit_bytes = max(1, -(-budget_bytes // GRID_UNITS))
    n_units = budget_bytes // unit_bytes
    found = _fewest_seconds(parts, unit_bytes, n_units, crossing_s, ends_on_gpu)
    if found is None:
        return None
    filled = _filled(parts, found, budget_bytes, crossing_s, ends_on_gpu)
    early = _early_first(parts, filled)
    times = [chain_s(parts, places, crossing_s, ends_on_gpu=ends_on_gpu) for places in (early, filled)]
    return early if times[0] <= SAME * times[1] else filled


def chain_s(parts: Sequence[PartOptions], places: Sequence[str], crossing_s: float, *, ends_on_gpu: bool) -> float:
    """Seconds of the chain in these places."""
    devices = [CPU, *(int(part[place].on_gpu) for part, place in zip(parts, places, strict=True)), int(ends_on_gpu)]
    n_crossings = sum(a != b for a, b in itertools.pairwise(devices))
    return n_crossings * crossing_s + sum(part[place].seconds for part, place in zip(parts, places, strict=True))


def chain_bytes(parts: Sequence[PartOptions], places: Sequence[str]) -> int:
    """GPU memory of the chain in these places."""
    return sum(part[place].gpu_bytes for part, place in zip(parts, places, strict=True))


def _fewest_seconds(
    parts: Sequence[PartOptions], unit_bytes: int, n_units: int, crossing_s: float, ends_on_gpu: bool
) -> tuple[str, ...] | None:
    """best[device][u]: least seconds with at most u units; chosen[i][device][u]: place and device before, in one."""
    best = np.full((2, n_units + 1), np.inf)
    best[CPU] = 0.0
    chosen = []
    for part in parts:
        after = np.full_like(best, np.inf)
        codes = np.zeros((2, n_units + 1), np.int8)
        for code, option in enumerate(part.values()):
            _take(option, code, best, after, codes, -(-option.gpu_bytes // unit_bytes), crossing_s)
        best = after
        chosen.append(codes)
    end = int(ends_on_gpu)
    totals = [best[device][n_units] + (crossing_s if device != end else 0.0) for device in (CPU, GPU)]
    device = int(np.argmin(totals))
    if not np.isfinite(totals[device]):
        return None
    return _traced(parts, chosen, device, n_units, unit_bytes)


def _take(option: Option, code: int, best: Any, after: Any, codes: Any, n_taken: int, crossing_s: float) -> None:
    """Offers one place of a part to every state."""
    n_left = best.shape[1] - n_taken
    if n_left <= 0:
        return
    device = int(option.on_gpu)
    stay, cross = best[device][:n_left], best[1 - device][:n_left] + crossing_s
    offered = np.minimum(stay, cross) + option.seconds
    target = after[device][n_taken:]
    better = offered < target
    before = np.where(stay <= cross, device, 1 - device)
    target[better] = offered[better]
    codes[device][n_taken:][better] = (2 * code + before)[better]


def _traced(
    parts: Sequence[PartOptions], chosen: Sequence[Any], device: int, units: int, unit_bytes: int
) -> tuple[str, ...]:
    places = []
    for part, codes in zip(reversed(parts), reversed(chosen), strict=True):
        code, before = divmod(int(codes[device][units]), 2)
        name, option = list(part.items())[code]
        places.append(name)
        units -= -(-option.gpu_bytes // unit_bytes)
        device = before
    return tuple(reversed(places))


def _early_first(parts: Sequence[PartOptions], places: tuple[str, ...]) -> tuple[str, ...]:
    """The same places dealt out anew among parts with the same options, the GPU's to the first of them."""
    alike: dict[tuple[tuple[str, Option], ...], list[int]] = {}
    for index, part in enumerate(parts):
        alike.setdefault(tuple(part.items()), []).append(index)
    dealt = list(places)
    for options, indices in alike.items():
        order = sorted((places[index] for index in indices), key=lambda place: (not dict(options)[place].on_gpu, place))
        for index, place in zip(indices, order, strict=True):
            dealt[index] = place
    return tuple(dealt)


def _filled(
    parts: Sequence[PartOptions], places: tuple[str, ...], budget_bytes: int, crossing_s: float, ends_on_gpu: bool
) -> tuple[str, ...]:
    """Changes one part's place at a time while that saves time and fits."""
    current, seconds = places, chain_s(parts, places, crossing_s, ends_on_gpu=ends_on_gpu)
    while True:
        free_bytes = budget_bytes - chain_bytes(parts, current)
        trials = [
            (*current[:i], name, *current[i + 1 :])
            for i, part in enumerate(parts)
            for name, option in part.items()
            if option.seconds < part[current[i]].seconds and option.gpu_bytes - part[current[i]].gpu_bytes <= free_bytes
        ]
        if not trials:
            return current
        trial_s, trial = min((chain_s(parts, t, crossing_s, ends_on_gpu=ends_on_gpu), t) for t in trials)
        if trial_s >= seconds:
            return current
        current, seconds = trial, trial_s
