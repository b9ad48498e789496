"""How much sparsity each layer takes: a share of all neurons dealt out where leaving them out costs least."""

import numpy as np
from numpy.typing import NDArray

SHARE_STEP = 0.05
SHARES = tuple(
    round(step * SHARE_STEP, 2) for step in range(20)
)  # of a layer's neurons, at which its error is measured


def dealt_shares(errors: NDArray[np.float32], target: float) -> NDArray[np.float64]:
    """The share of each layer, (n_layers,), whose mean is the target: greedily a step where it adds least error (TEAL,
    arXiv 2408.14690, deals so within a block), never worse than the same share everywhere.

    errors: of each layer at SHARES, (n_layers, n_shares). target: 0 to the last of SHARES.
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
    """Of all layers at their shares, between SHARES by straight lines."""
    return float(sum(np.interp(share, SHARES, row) for share, row in zip(shares, errors, strict=True)))
