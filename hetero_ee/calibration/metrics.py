"""Figures of early exit on held-out text: at each exit layer alone, and of exits at whichever exit layer comes first.

A depth counts layers that have run: a token that exits at exit layer b has depth b, one that never exits n_layers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.speculation.exits.schedule import N_LAST, RADIUS

MAX_DRAFTS = 8  # drafts in one simulated round

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExitLayerMetrics:
    """One exit layer on held-out tokens.

    agreement: share of tokens whose likeliest token here, without a map, is the full model's; mapped_agreement: with
    the exit map, None where there is none. exit_rate: share of tokens at which the gate lets exit; precision: share of
    those whose draft is right; recall: share of the tokens with a right draft that exit.
    acceptance: share of drafts kept in simulated rounds, which draft until the gate says no, or MAX_DRAFTS times, and
    keep drafts up to the first wrong one. kept_drafts: number of rounds by the drafts that they kept, from 0 on.
    refused_precision: share of the tokens that do not exit whose draft would have been right.
    """

    agreement: float
    mapped_agreement: float | None
    exit_rate: float
    precision: float
    recall: float
    acceptance: float
    kept_drafts: tuple[int, ...]
    refused_precision: float

    def __post_init__(self) -> None:
        shares = (self.agreement, self.exit_rate, self.precision, self.recall, self.acceptance, self.refused_precision)
        _check_shares(*shares, self.mapped_agreement or 0.0)
        if len(self.kept_drafts) != MAX_DRAFTS + 1 or min(self.kept_drafts) < 0:
            raise ValueError(f"kept_drafts has to be {MAX_DRAFTS + 1} counts")

    @property
    def drafted_agreement(self) -> float:
        """Agreement of the drafts as they are made: with the map where there is one."""
        return self.agreement if self.mapped_agreement is None else self.mapped_agreement


@dataclass(frozen=True, slots=True)
class DepthMetrics:
    """Exits at the first exit layer whose gate opens.

    histogram: tokens by depth 1..n_layers. mean_depth: theirs; oracle_mean_depth: with gates that open where, and only
    where, the draft is right. locality: share of tokens whose depth is within RADIUS of one of the N_LAST
    before it in its sequence; near_share: the mean share of depths that these cover, which is the chance of a hit.
    """

    histogram: tuple[int, ...]
    mean_depth: float
    oracle_mean_depth: float
    locality: float
    near_share: float

    def __post_init__(self) -> None:
        n_layers = len(self.histogram)
        if min(self.histogram, default=0) < 0 or not sum(self.histogram):
            raise ValueError("the histogram has to hold counts, some above 0")
        if not all(1 <= depth <= n_layers for depth in (self.mean_depth, self.oracle_mean_depth)):
            raise ValueError(f"mean depths lie between 1 and {n_layers}")
        _check_shares(self.locality, self.near_share)

    @property
    def exit_shares(self) -> tuple[float, ...]:
        """For each exit layer from 0 on the share of tokens whose first open gate is there; the rest has none."""
        n_tokens = sum(self.histogram)
        return (0.0, *(count / n_tokens for count in self.histogram[:-1]))

    @property
    def survival(self) -> tuple[float, ...]:
        """For each layer the share of tokens that pass it, if nothing is caught up on."""
        n_tokens = sum(self.histogram)
        return tuple(1 - sum(self.histogram[:layer]) / n_tokens for layer in range(len(self.histogram)))


def exit_layer_metrics(
    is_right: Sequence[Flags], gate: Sequence[Flags], agreement: float, mapped_agreement: float | None
) -> ExitLayerMetrics:
    """is_right, gate: for each chunk, whether each token's draft is the full model's and whether it may exit."""
    right, opened = np.concatenate(is_right), np.concatenate(gate)
    kept = [0] * (MAX_DRAFTS + 1)
    n_drafts = 0
    for rights, gates in zip(is_right, gate, strict=True):
        n_drafts += _add_rounds(rights, gates, kept)
    n_kept = sum(count * length for length, count in enumerate(kept))
    return ExitLayerMetrics(
        agreement=agreement,
        mapped_agreement=mapped_agreement,
        exit_rate=share_of(int(opened.sum()), len(opened)),
        precision=share_of(int((right & opened).sum()), int(opened.sum())),
        recall=share_of(int((right & opened).sum()), int(right.sum())),
        acceptance=share_of(n_kept, n_drafts),
        kept_drafts=tuple(kept),
        refused_precision=share_of(int((right & ~opened).sum()), int((~opened).sum())),
    )


def depth_figures(is_right: Sequence[Flags], gate: Sequence[Flags]) -> DepthMetrics:
    """is_right, gate: for each chunk (n_layers - 1, m) by exit layer."""
    n_layers = len(gate[0]) + 1
    depths = [_first_depths(each) for each in gate]
    histogram = np.bincount(np.concatenate(depths), minlength=n_layers + 1)[1:]
    near, covered = [], []
    for each in depths:
        recent: deque[int] = deque(maxlen=N_LAST)
        for depth in each.tolist():
            if recent:
                near.append(any(abs(depth - other) <= RADIUS for other in recent))
                covered.append(len(_around(recent, n_layers)) / n_layers)
            recent.append(depth)
    return DepthMetrics(
        histogram=tuple(histogram.tolist()),
        mean_depth=float(np.concatenate(depths).mean()),
        oracle_mean_depth=float(np.concatenate([_first_depths(each) for each in is_right]).mean()),
        locality=float(np.mean(near)) if near else 0.0,
        near_share=float(np.mean(covered)) if covered else 0.0,
    )


def share_of(part: int, whole: int) -> float:
    """part / whole, 0 of nothing."""
    return part / whole if whole else 0.0


def _check_shares(*shares: float) -> None:
    for share in shares:
        if not 0 <= share <= 1:
            raise ValueError(f"a share is {share}, expected 0 to 1")


def _first_depths(gate: Flags) -> NDArray[np.int64]:
    """Depth of each token: the first exit layer with a True, n_layers where there is none."""
    return np.where(gate.any(axis=0), gate.argmax(axis=0) + 1, len(gate) + 1)


def _around(recent: deque[int], n_layers: int) -> set[int]:
    """The depths within reach of the recent ones."""
    reach = range(-RADIUS, RADIUS + 1)
    return {depth + offset for depth in recent for offset in reach if 1 <= depth + offset <= n_layers}


def _add_rounds(is_right: Flags, gate: Flags, kept: list[int]) -> int:
    """Counts a chunk's rounds into `kept`; returns how many drafts they made."""
    n_drafts = start = 0
    while start < len(gate):
        window = slice(start, start + MAX_DRAFTS)
        drafted = _leading(gate[window])
        right = _leading(is_right[start : start + drafted])
        kept[right] += 1
        n_drafts += drafted
        start += right + 1
    return n_drafts


def _leading(flags: Flags) -> int:
    """How many flags are True before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())
