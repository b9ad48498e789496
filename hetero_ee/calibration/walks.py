"""Walks: rows judged at several exit layers alternately, the levels and then the exit layer that they wait at.

A row's first level takes its candidates with the whole head; the levels behind it look at those alone. A row that none
lets exit is judged at the last exit layer as if that were the first: whole head, fresh candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.metrics import Flags, share_of
from hetero_ee.planning.statistics import WalkRates
from hetero_ee.speculation.exits.calibration import FittedExitLayer
from hetero_ee.speculation.exits.sliced_logits import SlicedLogits


@dataclass(frozen=True, slots=True, eq=False)
class Walks:
    """m tokens, each walking to exit layer 1, 2, ...: all (n_exit_layers, m). depth: of the exit; is_exit; is_right:
    the draft of the exit, or the likeliest token at the last exit layer, is the full model's; n_evaluated: exit
    layers at which the token was judged."""

    depth: NDArray[np.int64]
    is_exit: Flags
    is_right: Flags
    n_evaluated: NDArray[np.int64]

    def metrics(self) -> tuple[WalkRates, ...]:
        """Of exit layer 1, 2, ..."""
        return tuple(self._metrics(place) for place in range(len(self.depth)))

    def _metrics(self, place: int) -> WalkRates:
        is_exit, is_right = self.is_exit[place], self.is_right[place]
        n_exits = int(is_exit.sum())
        return WalkRates(
            exit_rate=share_of(n_exits, len(is_exit)),
            precision=share_of(int((is_right & is_exit).sum()), n_exits),
            refused_precision=share_of(int((is_right & ~is_exit).sum()), len(is_exit) - n_exits),
            mean_exit_depth=share_of(int(self.depth[place][is_exit].sum()), n_exits),
            n_evaluated=share_of(int(self.n_evaluated[place].sum()), len(is_exit)),
        )

    @classmethod
    def joined(cls, parts: Sequence["Walks"]) -> "Walks":
        """Those of all parts' tokens."""
        names = ("depth", "is_exit", "is_right", "n_evaluated")
        return cls(*(np.concatenate([getattr(each, name) for each in parts], axis=1) for name in names))


def walks(fits: Sequence[FittedExitLayer], levels: Sequence[int], sliced: SlicedLogits) -> Walks:
    """fits: of exit layer 1, 2, ...; levels: ascending, each exit layer's walk passes those in front of it. A level
    without a sliced predictor is left out, unless it is the first."""
    levels = tuple(level for level in levels if level == levels[0] or fits[level - 1].sliced_predictor is not None)
    opened_at, right_there = _first_open(fits, levels, sliced)
    found = []
    for place, fitted in enumerate(fits):
        exit_layer = place + 1
        is_early = opened_at < exit_layer
        is_exit = is_early | _opens(fitted, sliced, exit_layer, None)
        is_right = np.where(is_early, right_there, sliced.is_right(exit_layer, exit_layer))
        n_levels = sum((opened_at >= level).astype(np.int64) for level in levels if level < exit_layer)
        found.append((np.where(is_early, opened_at, exit_layer), is_exit, is_right, n_levels + ~is_early))
    return Walks(*(np.stack(arrays) for arrays in zip(*found, strict=True)))


def _first_open(
    fits: Sequence[FittedExitLayer], levels: Sequence[int], sliced: SlicedLogits
) -> tuple[NDArray[np.int64], Flags]:
    """For each token the level that lets it exit, one behind the last exit layer where none does; and whether its draft
    is right there."""
    m = sliced.rank.shape[1]
    opened_at, is_right = np.full(m, len(fits) + 1), np.zeros(m, np.bool_)
    previous = None
    for level in levels:
        opens = _opens(fits[level - 1], sliced, levels[0], previous) & (opened_at > level)
        opened_at[opens] = level
        is_right[opens] = sliced.is_right(levels[0], level)[opens]
        previous = level
    return opened_at, is_right


def _opens(fitted: FittedExitLayer, sliced: SlicedLogits, first: int, previous: int | None) -> Flags:
    """(m,): where its gate opens, for candidates just taken where `previous` is None, else for those of `first`."""
    return fitted.opens(sliced.features(first, fitted.exit_layer, previous), is_sliced=previous is not None)
