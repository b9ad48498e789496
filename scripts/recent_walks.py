"""Walks as they are taken while drafting: levels near the last exits are woken, row after row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.draft_rows import draft_rows
from hetero_ee.calibration.traces import traces
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.calibration import Calibration
from hetero_ee.speculation.exits.schedule import RecentExits
from hetero_ee.speculation.exits.sliced_logits import SlicedLogits

Flags = NDArray[np.bool_]
Levels = Callable[[RecentExits, Sequence[int]], Sequence[int]]  # recent exits, the schedule -> levels
KINDS: dict[str, Levels] = {
    "the schedule alone": lambda recent, schedule: schedule,
    "with those near the last exits": lambda recent, schedule: recent.active(),
    "with those near them behind its first": lambda recent, schedule: [
        level for level in recent.active() if schedule and level >= schedule[0]
    ],
}


@dataclass(slots=True)
class RecentWalks:
    """Tokens counted. depths: of the exits."""

    n_tokens: int = 0
    n_right: int = 0
    n_evaluated: int = 0
    depths: list[int] = field(default_factory=list)

    @property
    def metrics(self) -> tuple[float, float, float, float]:
        """Exit rate, precision, mean exit depth, exit layers judged at."""
        n_exits = max(1, len(self.depths))
        rates = len(self.depths) / self.n_tokens, self.n_right / n_exits
        return (*rates, sum(self.depths) / n_exits, self.n_evaluated / self.n_tokens)


def recent_walks(
    executor: Executor, calibration: Calibration, chunks: Sequence[Sequence[int]], exit_layer: int
) -> Iterator[tuple[str, RecentWalks]]:
    """Of each of KINDS, walks to `exit_layer`; each chunk is a sequence of its own."""
    maps = {each.exit_layer: each.exit_map for each in calibration.exit_layers if each.exit_map}
    sliced = [draft_rows(executor, found, maps, with_unmapped=False).sliced for found in traces(executor, chunks)]
    for name, levels in KINDS.items():
        found = RecentWalks()
        for each in sliced:
            walk_through(each, calibration, exit_layer, levels, found)
        yield name, found


def walk_through(
    sliced: SlicedLogits, calibration: Calibration, exit_layer: int, levels: Levels, found: RecentWalks
) -> None:
    """One sequence's tokens, counted into `found`. A wrong exit is remembered as full depth, as verification has it."""

    @cache
    def opens(first: int, level: int, previous: int | None) -> Flags:
        features = sliced.features(first, level, previous)
        return calibration.at(level).opens(features, is_sliced=previous is not None)

    schedule = calibration.levels(exit_layer)
    recent = RecentExits(schedule, calibration.n_layers)
    for token in range(sliced.rank.shape[1]):
        ways = [level for level in levels(recent, schedule) if level < exit_layer]
        pairs = [(ways[0], level, previous) for level, previous in zip(ways, (None, *ways), strict=False)]
        pairs.append((exit_layer, exit_layer, None))
        exits = [place for place, pair in enumerate(pairs) if opens(*pair)[token]]
        found.n_tokens += 1
        found.n_evaluated += exits[0] + 1 if exits else len(pairs)
        first, depth, _ = pairs[exits[0]] if exits else (0, calibration.n_layers, None)
        is_right = bool(exits) and bool(sliced.is_right(first, depth)[token])
        found.n_right += is_right
        found.depths += [depth] if exits else []
        recent.append(depth if is_right else calibration.n_layers)
