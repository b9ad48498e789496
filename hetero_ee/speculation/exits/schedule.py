"""Which exit layers get a predictor: chosen once from how rows exit, and widened by where the last tokens exited.

Boundary b lies in front of layer b: b layers have run. SpecEE (arXiv 2504.08850, sections 5.1 and 5.2): a few places
take most exits, and tokens exit near where the last ones did.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

N_LAST = 5
RADIUS = 2

_Choice = tuple[float, tuple[int, ...]]  # what is saved, and the exit layers that save it


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Costs in one unit, seconds or bytes read. histogram[b]: share of rows whose first possible exit is exit layer b,
    the rest has none; layer[b]: of layer b, saved by every row that exits before it; predictor[b]: of judging a row at
    exit layer b, for every row that comes by; first: what a row's first exit layer costs beside that, the whole head.
    All as long as the model has layers; a row can exit wherever its first exit lies behind it.
    """

    histogram: tuple[float, ...]
    layer: tuple[float, ...]
    predictor: tuple[float, ...]
    first: float = 0.0
    _exitable: tuple[float, ...] = field(init=False, repr=False)
    _behind: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.histogram) == len(self.layer) == len(self.predictor) > 0:
            raise ValueError("histogram, layer and predictor need one entry a layer each")
        if min(self.histogram) < 0 or sum(self.histogram) > 1 + 1e-6:
            raise ValueError("histogram holds shares of all rows, at most 1 together")
        # [b]: the share of rows that could exit at b or before, and the cost of all layers from b on.
        object.__setattr__(self, "_exitable", tuple(accumulate(self.histogram)))
        object.__setattr__(self, "_behind", tuple(accumulate(reversed(self.layer)))[::-1])

    @property
    def n_layers(self) -> int:
        return len(self.histogram)

    def gain(self, before: int | None, exit_layer: int) -> float:
        """What a row saves on average by being judged here, the nearest exit layer before at `before` (None for
        none)."""
        exited = 0.0 if before is None else self._exitable[before]
        cost = self.predictor[exit_layer] + (self.first if before is None else 0.0)
        return (self._exitable[exit_layer] - exited) * self._behind[exit_layer] - (1 - exited) * cost

    def saved(self, exit_layers: Iterable[int]) -> float:
        """What a row saves on average by being judged at these exit layers, each 1 to n_layers - 1."""
        places = sorted(set(exit_layers))
        return sum(self.gain(before, place) for before, place in zip([None, *places], places, strict=False))


@dataclass(frozen=True, slots=True)
class ExitSchedule:
    """exit_layers: ascending, those worth judging rows at. saved: what a row saves by them on average, in the unit of
    the costs; worth: what of it each adds to the others."""

    exit_layers: tuple[int, ...]
    worth: tuple[float, ...]
    saved: float

    def __post_init__(self) -> None:
        if list(self.exit_layers) != sorted(set(self.exit_layers)) or min(self.exit_layers, default=1) < 1:
            raise ValueError("the exit layers of a schedule have to ascend from 1 or more")
        if len(self.worth) != len(self.exit_layers):
            raise ValueError(f"a schedule of {len(self.exit_layers)} exit layers says what {len(self.worth)} are worth")


NO_SCHEDULE = ExitSchedule((), (), 0.0)


def choose_exit_layers(costs: ExitCosts, n_most: int, first: int | None = None) -> ExitSchedule:
    """The at most n_most exit layers that save most together; none where none pays. first: the only one that may be the
    first of them, any where None.

    Exact, not greedy: what an exit layer gains depends on the nearest one before it alone, hence dynamic programming
    over (exit layers chosen, the last of them).
    """
    best: dict[int, _Choice] = {}
    found: _Choice = (0.0, ())
    for n_chosen in range(1, min(n_most, costs.n_layers - 1) + 1):
        longer: dict[int, _Choice] = {}
        for last in range(n_chosen, costs.n_layers):
            is_start = n_chosen == 1 and first in (None, last)
            starts: list[_Choice] = [(costs.gain(None, last), (last,))] if is_start else []
            starts += [
                (saved + costs.gain(places[-1], last), (*places, last))
                for saved, places in best.values()
                if places[-1] < last
            ]
            if starts:
                longer[last] = max(starts, key=lambda entry: entry[0])
        best = longer
        found = max([found, *best.values()], key=lambda entry: entry[0])
    exit_layers = found[1]
    worth = tuple(found[0] - costs.saved(set(exit_layers) - {place}) for place in exit_layers)
    return ExitSchedule(exit_layers, worth, found[0])


def exit_histogram(agrees: NDArray[np.bool_]) -> tuple[float, ...]:
    """agrees (m, n_layers): whether a row's token in front of layer b is the full model's -> share of rows, by the
    first exit layer from which on it stays so; exit layer 0, where nothing has run, takes no part."""
    m, n_layers = agrees.shape
    stays = np.logical_and.accumulate(agrees[:, ::-1], axis=1)[:, ::-1]
    stays[:, 0] = False
    first = np.where(stays.any(1), stays.argmax(1), n_layers)
    counts = np.bincount(first, minlength=n_layers + 1)[:n_layers]
    return tuple(float(count) / max(1, m) for count in counts)


class RecentExits:
    """The exit layers whose predictors are active for one sequence: those chosen, and those within `radius` of its last
    n_last exits. Make a new one for every sequence.

    Every exit is kept, two bytes each, so that undone drafts leave no trace.
    """

    def __init__(self, chosen: Iterable[int], n_layers: int, *, n_last: int = N_LAST, radius: int = RADIUS) -> None:
        self._n_layers, self._n_last, self._radius = n_layers, n_last, radius
        self._exits = array("H")
        # [b]: reasons to be active at exit layer b.
        self._reasons = [0] * n_layers
        for exit_layer in chosen:
            if not 0 < exit_layer < n_layers:
                raise ValueError(f"exit layer {exit_layer} of a model with {n_layers} layers")
            self._reasons[exit_layer] += 1

    def __len__(self) -> int:
        """Exits entered."""
        return len(self._exits)

    def append(self, exit_layer: int) -> None:
        """The next token exited here; at n_layers where it passed every layer. Raises ValueError beyond 1 to that."""
        if not 0 < exit_layer <= self._n_layers:
            raise ValueError(f"an exit at exit layer {exit_layer} of a model with {self._n_layers} layers")
        if len(self._exits) >= self._n_last:
            self._count(self._exits[-self._n_last], -1)
        self._exits.append(exit_layer)
        self._count(exit_layer, 1)

    def truncate(self, n_exits: int) -> None:
        """Back to the first n_exits exits, as if the others had never been entered."""
        while len(self._exits) > n_exits:
            self._count(self._exits.pop(), -1)
            if len(self._exits) >= self._n_last:
                self._count(self._exits[-self._n_last], 1)

    def is_active(self, exit_layer: int) -> bool:
        """Whether the predictor at this exit layer, 0 to n_layers - 1, is evaluated for the next token."""
        return self._reasons[exit_layer] > 0

    def active(self) -> tuple[int, ...]:
        """All such exit layers, ascending."""
        return tuple(exit_layer for exit_layer, reasons in enumerate(self._reasons) if reasons)

    def _count(self, exit_layer: int, change: int) -> None:
        first, last = max(1, exit_layer - self._radius), min(self._n_layers - 1, exit_layer + self._radius)
        for near in range(first, last + 1):
            self._reasons[near] += change
