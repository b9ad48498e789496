"""Active exit layers of a sequence: those of the schedule, and those near the exits of its last tokens.

Tokens tend to exit near the layers where the last tokens did (SpecEE, arXiv 2504.08850, section 5.2).
"""

from collections import deque
from collections.abc import Iterable

N_LAST = 5
RADIUS = 2


class RecentExits:
    """Active exit layers of one sequence: the scheduled ones, and those within RADIUS of its last N_LAST exits."""

    def __init__(self, chosen: Iterable[int], n_layers: int) -> None:
        self._chosen, self._last_layer = frozenset(chosen), n_layers - 1
        self._exits: deque[int] = deque(maxlen=N_LAST)

    def append(self, depth: int) -> None:
        self._exits.append(depth)

    def active(self) -> tuple[int, ...]:
        """Return the exit layers that judge the next token, in ascending order."""
        return tuple(sorted(self._chosen | nearby(self._exits, self._last_layer)))


def nearby(depths: Iterable[int], last: int) -> set[int]:
    """Return the depths from 1 to `last` that are within RADIUS of any of `depths`."""
    return {near for depth in depths for near in range(max(1, depth - RADIUS), min(last, depth + RADIUS) + 1)}
