"""The active exit layers of a sequence: those of the schedule, and those near where its last tokens exited.

SpecEE (arXiv 2504.08850, section 5.2): tokens exit near where the last ones did.
"""

from array import array
from collections.abc import Iterable

N_LAST = 5
RADIUS = 2


class RecentExits:
    """Active exit layers of one sequence: the chosen ones, and those within RADIUS of its last N_LAST exits. It keeps
    every exit, two bytes each, so that undone drafts leave no trace."""

    def __init__(self, chosen: Iterable[int], n_layers: int) -> None:
        self._chosen, self._n_layers = frozenset(chosen), n_layers
        self._exits = array("H")
        for exit_layer in self._chosen:
            if not 0 < exit_layer < n_layers:
                raise ValueError(f"exit layer {exit_layer} of a model with {n_layers} layers")

    def __len__(self) -> int:
        """Return the number of exits."""
        return len(self._exits)

    def append(self, depth: int) -> None:
        """Add the next token's exit depth, n_layers if it passed all layers.

        Raises:
            ValueError: if the depth is not from 1 to n_layers.
        """
        if not 0 < depth <= self._n_layers:
            raise ValueError(f"an exit at exit layer {depth} of a model with {self._n_layers} layers")
        self._exits.append(depth)

    def truncate(self, n_exits: int) -> None:
        """Restore the state after the first n_exits exits."""
        del self._exits[n_exits:]

    def active(self) -> tuple[int, ...]:
        """Return the exit layers whose predictors judge the next token, ascending."""
        near = nearby(self._exits[-N_LAST:], self._n_layers - 1)
        return tuple(sorted(self._chosen | near))


def nearby(depths: Iterable[int], last: int) -> set[int]:
    """Return the depths from 1 to `last` that are within RADIUS of one of these."""
    return {near for depth in depths for near in range(max(1, depth - RADIUS), min(last, depth + RADIUS) + 1)}
