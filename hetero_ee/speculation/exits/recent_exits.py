"""The active exit layers of a sequence: those of the schedule, and those near where its last tokens exited.

SpecEE (arXiv 2504.08850, section 5.2): tokens exit near where the last ones did.
"""

from collections import deque
from collections.abc import Iterable

N_LAST = 5
RADIUS = 2


class RecentExits:
    """Active exit layers of one sequence: the chosen ones, and those within RADIUS of its last N_LAST exits."""

    def __init__(self, chosen: Iterable[int], n_layers: int) -> None:
        self._chosen, self._last_layer = frozenset(chosen), n_layers - 1
        self._exits: deque[int] = deque(maxlen=N_LAST)

    def append(self, depth: int) -> None:
        """Add the next token's exit depth, n_layers if it passed all layers."""
        self._exits.append(depth)

    def active(self) -> tuple[int, ...]:
        """Return the exit layers whose predictors judge the next token, ascending."""
        return tuple(sorted(self._chosen | nearby(self._exits, self._last_layer)))


def nearby(depths: Iterable[int], last: int) -> set[int]:
    """Return the depths from 1 to `last` that are within RADIUS of one of these."""
    return {near for depth in depths for near in range(max(1, depth - RADIUS), min(last, depth + RADIUS) + 1)}
