"""Distributes sparsity over the layers: a share of all neurons is left out where that costs least."""

import numpy as np
from numpy.typing import NDArray

SHARE_STEP = 0.05
SHARES = tuple(
    round(step * SHARE_STEP, 2) for step in range(20)
)  # of a layer's neurons, at which its error is measured


def dealt_shares(errors: NDArray[np.float32], target: float) -> NDArray[np.float64]:
    """Return each layer's share, (n_layers,), with the target as their mean, never worse than the same share
    everywhere.

    Greedy: each step goes to the layer where it adds the least error, as TEAL (arXiv 2408.14690) does within a block.

    Args:
        errors: Each layer's errors at SHARES, (n_layers, n_shares).
        target: 0 to the last of SHARES.
    """
    n_layers = len(errors)
    steps = np.zeros(n_layers, np.int64)
    added = np.diff(errors.astype(np.float64), axis=1, append=np.inf)
    n_whole, rest = divmod(round(target * n_layers / SHARE_STEP, 6), 1)
    for _ in range(int(n_whole)):
        steps[np.argmin(added[np.arange(n_layers), steps])] += 1
    shares: NDArray[np.float64] = steps.astype(np.float64) * SHARE_STEP
    if rest:
        shares[np.argmin(added[np.arange(n_layers), steps])] += rest * SHARE_STEP
    uniform = np.full(n_layers, target)
    return shares if total_error(errors, shares) <= total_error(errors, uniform) else uniform


def total_error(errors: NDArray[np.float32], shares: NDArray[np.float64]) -> float:
    """Return the sum of all layers' errors at their shares, interpolated linearly between SHARES."""
    return float(sum(np.interp(share, SHARES, row) for share, row in zip(shares, errors, strict=True)))
