"""Which boundaries get a predictor: chosen once from how rows exit, and widened by where the last tokens exited.

Boundary b lies in front of layer b: b layers have run. SpecEE (arXiv 2504.08850, sections 5.1 and 5.2): a few places
take most exits, and tokens exit near where the last ones did.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

N_LAST = 5
RADIUS = 2

_Choice = tuple[float, tuple[int, ...]]  # seconds saved, and the boundaries that save them


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """histogram[b]: share of rows whose first possible exit is boundary b, the rest has none; layer_s[b]: seconds of
    layer b, saved by every row that exits before it; predictor_s[b]: seconds of a predictor at boundary b, for every
    row that comes by. All as long as the model has layers; a row can exit wherever its first exit lies behind it.
    """

    histogram: tuple[float, ...]
    layer_s: tuple[float, ...]
    predictor_s: tuple[float, ...]
    _exitable: tuple[float, ...] = field(init=False, repr=False)
    _behind_s: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.histogram) == len(self.layer_s) == len(self.predictor_s) > 0:
            raise ValueError("histogram, layer_s and predictor_s need one entry a layer each")
        if min(self.histogram) < 0 or sum(self.histogram) > 1 + 1e-6:
            raise ValueError("histogram holds shares of all rows, at most 1 together")
        # [b]: the share of rows that could exit at b or before, and the seconds of all layers from b on.
        object.__setattr__(self, "_exitable", tuple(accumulate(self.histogram)))
        object.__setattr__(self, "_behind_s", tuple(accumulate(reversed(self.layer_s)))[::-1])

    @property
    def n_layers(self) -> int:
        return len(self.histogram)

    def gain_s(self, before: int | None, boundary: int) -> float:
        """Expected seconds a row saves by a predictor here, the nearest one before it at `before` (None for none)."""
        exited = 0.0 if before is None else self._exitable[before]
        return (self._exitable[boundary] - exited) * self._behind_s[boundary] - (1 - exited) * self.predictor_s[
            boundary
        ]

    def saved_s(self, boundaries: Iterable[int]) -> float:
        """Expected seconds a row saves with predictors at these boundaries, each 1 to n_layers - 1."""
        places = sorted(set(boundaries))
        return sum(self.gain_s(before, place) for before, place in zip([None, *places], places, strict=False))


@dataclass(frozen=True, slots=True)
class ExitSchedule:
    """boundaries: ascending, those worth a predictor. worth_s: what each adds to the others, expected seconds a row.
    saved_s: what all save together."""

    boundaries: tuple[int, ...]
    worth_s: tuple[float, ...]
    saved_s: float


def choose_boundaries(costs: ExitCosts, n_most: int) -> ExitSchedule:
    """The at most n_most boundaries whose predictors save most together; none where none pays.

    Exact, not greedy: what a predictor gains depends on the nearest one before it alone, hence dynamic programming over
    (boundaries chosen, the last of them).
    """
    best: dict[int, _Choice] = {}
    found: _Choice = (0.0, ())
    for n_chosen in range(1, min(n_most, costs.n_layers - 1) + 1):
        longer: dict[int, _Choice] = {}
        for last in range(n_chosen, costs.n_layers):
            starts: list[_Choice] = [(costs.gain_s(None, last), (last,))] if n_chosen == 1 else []
            starts += [
                (saved + costs.gain_s(places[-1], last), (*places, last))
                for saved, places in best.values()
                if places[-1] < last
            ]
            longer[last] = max(starts, key=lambda entry: entry[0])
        best = longer
        found = max([found, *best.values()], key=lambda entry: entry[0])
    boundaries = found[1]
    worth = tuple(found[0] - costs.saved_s(set(boundaries) - {place}) for place in boundaries)
    return ExitSchedule(boundaries, worth, found[0])


def exit_histogram(agrees: NDArray[np.bool_]) -> tuple[float, ...]:
    """agrees (m, n_layers): whether a row's token in front of layer b is the full model's -> share of rows, by the
    first boundary from which on it stays so; boundary 0, where nothing has run, takes no part."""
    m, n_layers = agrees.shape
    stays = np.logical_and.accumulate(agrees[:, ::-1], axis=1)[:, ::-1]
    stays[:, 0] = False
    first = np.where(stays.any(1), stays.argmax(1), n_layers)
    counts = np.bincount(first, minlength=n_layers + 1)[:n_layers]
    return tuple(float(count) / max(1, m) for count in counts)


class RecentExits:
    """The boundaries whose predictors are active for one sequence: those chosen, and those within `radius` of its last
    n_last exits. Make a new one for every sequence.

    Every exit is kept, two bytes each, so that undone drafts leave no trace.
    """

    def __init__(self, chosen: Iterable[int], n_layers: int, *, n_last: int = N_LAST, radius: int = RADIUS) -> None:
        self._n_layers, self._n_last, self._radius = n_layers, n_last, radius
        self._exits = array("H")
        # [b]: reasons to be active at boundary b.
        self._reasons = [0] * n_layers
        for boundary in chosen:
            if not 0 < boundary < n_layers:
                raise ValueError(f"boundary {boundary} of a model with {n_layers} layers")
            self._reasons[boundary] += 1

    def __len__(self) -> int:
        """Exits entered."""
        return len(self._exits)

    def append(self, boundary: int) -> None:
        """The next token exited here; at n_layers where it passed every layer. Raises ValueError beyond 1 to that."""
        if not 0 < boundary <= self._n_layers:
            raise ValueError(f"an exit at boundary {boundary} of a model with {self._n_layers} layers")
        if len(self._exits) >= self._n_last:
            self._count(self._exits[-self._n_last], -1)
        self._exits.append(boundary)
        self._count(boundary, 1)

    def truncate(self, n_exits: int) -> None:
        """Back to the first n_exits exits, as if the others had never been entered."""
        while len(self._exits) > n_exits:
            self._count(self._exits.pop(), -1)
            if len(self._exits) >= self._n_last:
                self._count(self._exits[-self._n_last], 1)

    def is_active(self, boundary: int) -> bool:
        """Whether the predictor at this boundary, 0 to n_layers - 1, is evaluated for the next token."""
        return self._reasons[boundary] > 0

    def active(self) -> tuple[int, ...]:
        """All such boundaries, ascending."""
        return tuple(boundary for boundary, reasons in enumerate(self._reasons) if reasons)

    def _count(self, boundary: int, change: int) -> None:
        first, last = max(1, boundary - self._radius), min(self._n_layers - 1, boundary + self._radius)
        for near in range(first, last + 1):
            self._reasons[near] += change


def locality(exits: Sequence[int], n_last: int = N_LAST, radius: int = RADIUS) -> float:
    """Share of one sequence's exits within `radius` of one of the n_last before (at the start of those there are); the
    first, which has none before it, is not counted. 0 where it is alone."""
    places = range(1, len(exits))
    near = (
        any(abs(exits[place] - earlier) <= radius for earlier in exits[max(0, place - n_last) : place])
        for place in places
    )
    return sum(near) / len(places) if places else 0.0
