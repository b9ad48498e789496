"""Which exit layers are active for a sequence: those of the schedule, and those near where its last tokens exited.

SpecEE (arXiv 2504.08850, section 5.2): tokens exit near where the last ones did.
"""

from array import array
from collections.abc import Iterable

N_LAST = 5
RADIUS = 2


class RecentExits:
    """The exit layers whose predictors are active for one sequence: those chosen, and those within RADIUS of its last
    N_LAST exits. Every exit is kept, two bytes each, so that undone drafts leave no trace."""

    def __init__(self, chosen: Iterable[int], n_layers: int) -> None:
        self._chosen, self._n_layers = frozenset(chosen), n_layers
        self._exits = array("H")
        for exit_layer in self._chosen:
            if not 0 < exit_layer < n_layers:
                raise ValueError(f"exit layer {exit_layer} of a model with {n_layers} layers")

    def __len__(self) -> int:
        """Exits entered."""
        return len(self._exits)

    def append(self, depth: int) -> None:
        """The next token exited after this many layers, n_layers where it passed them all. Raises ValueError beyond 1
        to that."""
        if not 0 < depth <= self._n_layers:
            raise ValueError(f"an exit at exit layer {depth} of a model with {self._n_layers} layers")
        self._exits.append(depth)

    def truncate(self, n_exits: int) -> None:
        """Back to the first n_exits exits, as if the others had never been entered."""
        del self._exits[n_exits:]

    def active(self) -> tuple[int, ...]:
        """Exit layers whose predictors are evaluated for the next token, ascending."""
        near = nearby(self._exits[-N_LAST:], self._n_layers - 1)
        return tuple(sorted(self._chosen | near))


def nearby(depths: Iterable[int], last: int) -> set[int]:
    """Depths from 1 to `last` that are within RADIUS of one of these."""
    return {near for depth in depths for near in range(max(1, depth - RADIUS), min(last, depth + RADIUS) + 1)}
