"""Active exit layers of a sequence: those of the schedule, and those near the exits of its last tokens.

Tokens tend to exit near the layers where the last tokens did (SpecEE, arXiv 2504.08850, section 5.2). Either group can
be left out to measure what it gains; without both, every layer is active.
"""

from collections import deque
from collections.abc import Iterable

from hetero_ee.options.engine import BOTH, NO_SCHEDULE, OFFLINE, ONLINE

N_LAST = 5
RADIUS = 2


class RecentExits:
    """Active exit layers of one sequence: the scheduled ones, and those within RADIUS of its last N_LAST exits.

    Args:
        scheduling: Whether both groups count (BOTH) or one of them (OFFLINE, ONLINE), or all layers (NO_SCHEDULE). If
            only recent exits count, all layers are active until there is one.
    """

    def __init__(self, chosen: Iterable[int], n_layers: int, scheduling: str = BOTH) -> None:
        self._chosen, self._last_layer, self._scheduling = frozenset(chosen), n_layers - 1, scheduling
        self._exits: deque[int] = deque(maxlen=N_LAST)

    def append(self, depth: int) -> None:
        self._exits.append(depth)

    def active(self) -> tuple[int, ...]:
        """Return the exit layers that judge the next token, in ascending order."""
        if self._scheduling == OFFLINE:
            return tuple(sorted(self._chosen))
        if self._scheduling == NO_SCHEDULE or (self._scheduling == ONLINE and not self._exits):
            return tuple(range(1, self._last_layer + 1))
        near = nearby(self._exits, self._last_layer)
        return tuple(sorted(near if self._scheduling == ONLINE else self._chosen | near))


def nearby(depths: Iterable[int], last: int) -> set[int]:
    """Return the depths from 1 to `last` that are within RADIUS of any of `depths`."""
    return {near for depth in depths for near in range(max(1, depth - RADIUS), min(last, depth + RADIUS) + 1)}
