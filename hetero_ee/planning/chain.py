"""Finds the placements of a chain of parts that make one pass fastest within the GPU's memory.

It is a dynamic programme over the parts, the device of the previous part, and the memory used so far. Memory is counted
in units, a fraction of the budget. Sizes are rounded up to whole units; memory left over by the rounding is used at the
end.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_ee.planning.placement import Placement

GRID_UNITS = 2**13  # rounding up wastes at most a fiftieth of the budget for 80 layers, before filling
SAME = 1.001  # of plans this close the one with early layers on the GPU is better, as drafts exit early
CPU, GPU = 0, 1


@dataclass(frozen=True, slots=True)
class Option:
    seconds: float
    gpu_bytes: int
    on_gpu: bool


PartOptions = Mapping[Placement, Option]
Chain = tuple[Placement, ...]  # of consecutive parts


def place_chain(
    parts: Sequence[PartOptions], budget_bytes: int, transfer_s: float, *, ends_on_gpu: bool
) -> Chain | None:
    """Return the fastest placements whose VRAM fits the budget, None if none do. Hidden states start on the CPU."""
    unit_bytes = max(1, -(-budget_bytes // GRID_UNITS))
    units = [[-(-option.gpu_bytes // unit_bytes) for option in part.values()] for part in parts]
    n_units = budget_bytes // unit_bytes
    if sum(map(max, units)) <= n_units:
        found = _fastest(parts, transfer_s, ends_on_gpu)
    else:
        found = _Grid(parts, units, n_units, transfer_s).fewest_seconds(ends_on_gpu)
    if found is None:
        return None
    filled = _filled(parts, found, budget_bytes, transfer_s, ends_on_gpu)
    early = _early_first(parts, filled)
    times = [chain_s(parts, each, transfer_s, ends_on_gpu=ends_on_gpu) for each in (early, filled)]
    return early if times[0] <= SAME * times[1] else filled


def chain_s(
    parts: Sequence[PartOptions], placements: Sequence[Placement], transfer_s: float, *, ends_on_gpu: bool
) -> float:
    """Return the seconds of one pass through the parts, with the transfers between devices. It starts on the CPU."""
    options = [part[placement] for part, placement in zip(parts, placements, strict=True)]
    devices = [False, *[option.on_gpu for option in options], ends_on_gpu]
    n_transfers: int = sum(map(operator.ne, devices, devices[1:]))
    return n_transfers * transfer_s + sum([option.seconds for option in options])


def chain_bytes(parts: Sequence[PartOptions], placements: Sequence[Placement]) -> int:
    """Return the VRAM that the parts use with these placements."""
    return sum([part[placement].gpu_bytes for part, placement in zip(parts, placements, strict=True)])


def _fastest(parts: Sequence[PartOptions], transfer_s: float, ends_on_gpu: bool) -> Chain | None:
    """Return the fastest placements regardless of memory."""
    best = [0.0, math.inf]
    chosen: list[list[tuple[Placement, int]]] = []
    for part in parts:
        after, choices = [math.inf, math.inf], [(Placement.CPU, CPU), (Placement.CPU, GPU)]
        for name, option in part.items():
            device = int(option.on_gpu)
            stay, transfer = best[device], best[1 - device] + transfer_s
            offered = min(stay, transfer) + option.seconds
            if offered < after[device]:
                after[device], choices[device] = offered, (name, device if stay <= transfer else 1 - device)
        best = after
        chosen.append(choices)
    device = _last_device(best, transfer_s, ends_on_gpu)
    placements = []
    for choices in reversed(chosen):
        name, device = choices[device]
        placements.append(name)
    return tuple(reversed(placements))


def _last_device(best: Sequence[float], transfer_s: float, ends_on_gpu: bool) -> int:
    totals = [best[device] + (transfer_s if device != ends_on_gpu else 0.0) for device in (CPU, GPU)]
    return GPU if totals[GPU] < totals[CPU] else CPU


@dataclass(frozen=True, slots=True)
class _Step:
    """Choices that the dynamic programme recorded for one part."""

    first: int  # units of the first column of codes
    codes: Any  # codes[device][u]: the option's number
    first_before: int
    last_before: int
    before: Any  # before[device][u]: least seconds before the part, for the units from first_before to last_before


class _Grid:
    """The dynamic programme over units of memory: `units` of each part's options, `n_units` in the budget."""

    def __init__(
        self, parts: Sequence[PartOptions], units: Sequence[Sequence[int]], n_units: int, transfer_s: float
    ) -> None:
        self._parts, self._units, self._transfer_s = parts, units, transfer_s
        most = [max(each) for each in units]
        # More units than the parts so far can use change nothing; fewer than the others leave over are useless.
        self._lasts = [min(n_units, taken) for taken in itertools.accumulate(most, initial=0)]
        left = [*itertools.accumulate(reversed(most), initial=0)][::-1]
        self._firsts = [min(last, max(0, n_units - rest)) for last, rest in zip(self._lasts, left, strict=True)]

    def fewest_seconds(self, ends_on_gpu: bool) -> Chain | None:
        """Return the fastest placements within the budget, None if none fit."""
        best = np.array([[0.0], [np.inf]])
        steps = []
        for index in range(len(self._parts)):
            best, step = self._after(index, best)
            steps.append(step)
        totals = [float(best[device][-1]) for device in (CPU, GPU)]
        if not np.isfinite(min(totals)):
            return None
        return self._traced(steps, _last_device(totals, self._transfer_s, ends_on_gpu))

    def _after(self, index: int, best: Any) -> tuple[Any, _Step]:
        """Return the least seconds after this part, best[device][units], and the choices that lead to them."""
        options = list(self._parts[index].values())
        arrived = [*np.minimum(best, best[::-1] + self._transfer_s)]
        first, last = self._firsts[index + 1], self._lasts[index + 1]
        after = np.full((len(arrived), last - first + 1), np.inf)
        codes = np.zeros(after.shape, np.int16)
        for code, (option, taken) in enumerate(zip(options, self._units[index], strict=True)):
            n_reached = last + 1 - max(first, taken)
            if n_reached <= 0:
                continue
            row = int(option.on_gpu)
            offered, best_s = self._seen_from(index, arrived[row], taken) + option.seconds, after[row][-n_reached:]
            better = offered < best_s
            np.copyto(best_s, offered, where=better)
            np.copyto(codes[row][-n_reached:], np.int16(code), where=better)
        return after, _Step(first, codes, self._firsts[index], self._lasts[index], best)

    def _seen_from(self, index: int, values: Any, taken: int) -> Any:
        """Return the entries of `values` (before the part) that lead to each state after it, using `taken` units."""
        first, last = self._firsts[index], self._lasts[index]
        start, end = max(0, self._firsts[index + 1] - taken), self._lasts[index + 1] - taken
        kept, n_beyond = values[start - first : end - first + 1], end - max(last, start - 1)
        return np.concatenate([kept, np.full(n_beyond, values[-1])]) if n_beyond > 0 else kept

    def _traced(self, steps: Sequence[_Step], device: int) -> Chain:
        placements = []
        n_units = self._lasts[-1]
        for part, units, step in zip(reversed(self._parts), reversed(self._units), reversed(steps), strict=True):
            code = int(step.codes[device][n_units - step.first])
            placements.append(list(part)[code])
            n_units = min(n_units - units[code], step.last_before)
            before = step.before[:, n_units - step.first_before]
            device = device if before[device] <= before[1 - device] + self._transfer_s else 1 - device
        return tuple(reversed(placements))


def _early_first(parts: Sequence[PartOptions], placements: Chain) -> Chain:
    """Reorder the placements of parts with equal options, so that earlier parts are on the GPU."""
    alike: dict[tuple[tuple[Placement, Option], ...], list[int]] = {}
    for index, part in enumerate(parts):
        alike.setdefault(tuple(part.items()), []).append(index)
    dealt = list(placements)
    for options, indices in alike.items():
        order = sorted(
            (placements[index] for index in indices), key=lambda name: (not dict(options)[name].on_gpu, name)
        )
        for index, name in zip(indices, order, strict=True):
            dealt[index] = name
    return tuple(dealt)


def _filled(
    parts: Sequence[PartOptions], placements: Chain, budget_bytes: int, transfer_s: float, ends_on_gpu: bool
) -> Chain:
    """Use the remaining memory: change one part's placement at a time, while that saves time and fits."""
    current, seconds = placements, chain_s(parts, placements, transfer_s, ends_on_gpu=ends_on_gpu)
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
        trial_s, trial = min((chain_s(parts, t, transfer_s, ends_on_gpu=ends_on_gpu), t) for t in trials)
        if trial_s >= seconds:
            return current
        current, seconds = trial, trial_s
