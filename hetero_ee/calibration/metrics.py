"""Metrics of early exits on held-out text: for each exit layer separately, and for exits at the first open gate.

A depth counts the layers that ran: b for a token that exits at exit layer b, n_layers for one that never exits.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_ee.speculation.exits.calibration import MAX_DRAFTS, DepthMetrics, ExitLayerMetrics, FittedExitLayer
from hetero_ee.speculation.exits.recent_exits import N_LAST, RADIUS, nearby

Flags = NDArray[np.bool_]


def all_metrics(
    exit_layers: Sequence[FittedExitLayer],
    is_right: Sequence[Flags],
    is_right_unmapped: Sequence[Flags],
    gate: Sequence[Flags],
) -> tuple[tuple[ExitLayerMetrics, ...], DepthMetrics]:
    """Return the metrics of each exit layer from 1 on, and of all together. Flags: per chunk (n_exit_layers, m)."""
    found = []
    for index, each in enumerate(exit_layers):
        mapped, unmapped = (np.concatenate([flags[index] for flags in part]) for part in (is_right, is_right_unmapped))
        found.append(
            exit_layer_metrics(
                [flags[index] for flags in is_right],
                [flags[index] for flags in gate],
                agreement=float(unmapped.mean()),
                mapped_agreement=float(mapped.mean()) if each.exit_map else None,
            )
        )
    return tuple(found), depth_metrics(is_right, gate)


def opened(exit_layers: Sequence[FittedExitLayer], features: NDArray[np.float32]) -> Flags:
    """Return where each exit layer's gate opens for tokens judged there first, (n_exit_layers, m). features:
    (n_exit_layers, m, 12).
    """
    return np.stack([each.opens(own, is_partial=False) for each, own in zip(exit_layers, features, strict=True)])


def exit_layer_metrics(
    is_right: Sequence[Flags], gate: Sequence[Flags], agreement: float, mapped_agreement: float | None
) -> ExitLayerMetrics:
    """Return one exit layer's metrics. is_right, gate: per chunk, for each token whether its draft is right and whether
    it may exit.
    """
    right, opened = np.concatenate(is_right), np.concatenate(gate)
    kept = [0] * (MAX_DRAFTS + 1)
    n_drafts = 0
    for rights, gates in zip(is_right, gate, strict=True):
        n_drafts += _add_steps(rights, gates, kept)
    n_kept = sum(count * length for length, count in enumerate(kept))
    return ExitLayerMetrics(
        agreement=agreement,
        mapped_agreement=mapped_agreement,
        exit_rate=_share(int(opened.sum()), len(opened)),
        precision=_share(int((right & opened).sum()), int(opened.sum())),
        recall=_share(int((right & opened).sum()), int(right.sum())),
        acceptance=_share(n_kept, n_drafts),
        kept_drafts=tuple(kept),
        refused_precision=_share(int((right & ~opened).sum()), int((~opened).sum())),
    )


def depth_metrics(is_right: Sequence[Flags], gate: Sequence[Flags]) -> DepthMetrics:
    """Return the metrics of exits at the first open gate. is_right, gate: per chunk (n_layers - 1, m) by exit layer."""
    n_layers = len(gate[0]) + 1
    depths = [_first_depths(each) for each in gate]
    histogram = np.bincount(np.concatenate(depths), minlength=n_layers + 1)[1:]
    near, covered = [], []
    for each in depths:
        recent: deque[int] = deque(maxlen=N_LAST)
        for depth in each.tolist():
            if recent:
                near.append(any(abs(depth - other) <= RADIUS for other in recent))
                covered.append(len(nearby(recent, n_layers)) / n_layers)
            recent.append(depth)
    return DepthMetrics(
        histogram=tuple(histogram.tolist()),
        mean_depth=float(np.concatenate(depths).mean()),
        oracle_mean_depth=float(np.concatenate([_first_depths(each) for each in is_right]).mean()),
        locality=float(np.mean(near)) if near else 0.0,
        near_share=float(np.mean(covered)) if covered else 0.0,
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _first_depths(gate: Flags) -> NDArray[np.int64]:
    """Return each token's depth: the first exit layer with a True, or n_layers."""
    return np.where(gate.any(axis=0), gate.argmax(axis=0) + 1, len(gate) + 1)


def _add_steps(is_right: Flags, gate: Flags, kept: list[int]) -> int:
    """Count a chunk's simulated draft-verify steps into `kept` and return their number of drafts."""
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
    """Count the leading flags that are True."""
    return len(flags) if flags.all() else int(flags.argmin())
