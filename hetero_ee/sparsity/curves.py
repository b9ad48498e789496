"""Sparsity curves: quantiles of neuron scores, the error of leaving neurons out, and comparisons with the dense
model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_ee.errors import UsageError
from hetero_ee.sparsity.dealing import SHARES, dealt_shares
from hetero_ee.sparsity.thresholds import Thresholds

MAX_KL_NATS = 0.005  # of `auto`: about what int4 weights cost the demo model (docs/quality.md)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one target on held-out text."""

    target: float
    share: float  # of neurons that were left out, including those that are 0
    kl_nats: float  # mean KL divergence of the next-token distribution, dense to sparse

    def __post_init__(self) -> None:
        if not (0 < self.target <= SHARES[-1] and 0 <= self.share <= 1 and 0 <= self.kl_nats < math.inf):
            raise ValueError(f"it measures {self.share} left out and {self.kl_nats} nats at {self.target}")


@dataclass(frozen=True, slots=True, eq=False)
class SparsityCurves:
    """Thresholds and errors of each layer by the share of neurons left out: fp32 (n_layers, n_shares), see SHARES.

    An error is the squared norm of what the FFN's sum lacks, relative to that of the residual stream after it, averaged
    over tokens.
    """

    thresholds: NDArray[np.float32]
    errors: NDArray[np.float32]
    measured: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        for name in ("thresholds", "errors"):
            values = getattr(self, name)
            if values.dtype != np.float32 or values.ndim != 2 or values.shape[1] != len(SHARES):
                raise ValueError(f"its {name} have another type or shape")
            if not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(f"its {name} have a value that is negative or not finite")
        if len(self.thresholds) != len(self.errors) or (np.diff(self.thresholds, axis=1) < 0).any():
            raise ValueError("its thresholds don't ascend, or have other layers than its errors")

    @property
    def active_share(self) -> float:
        """Share of all neurons that are not 0: to a step of SHARES, and never less than 1 minus the last of them."""
        n_zero = np.maximum(1, (self.thresholds == 0).sum(axis=1))
        return 1 - float(np.mean(np.array(SHARES)[n_zero - 1]))

    def at(self, target: float) -> Thresholds:
        """Return the thresholds for a target share, above 0 up to the last of SHARES, distributed over the layers."""
        shares = dealt_shares(self.errors, target)
        between = (np.interp(share, SHARES, row) for share, row in zip(shares, self.thresholds, strict=True))
        return Thresholds(target, tuple(float(np.float32(threshold)) for threshold in between))

    def auto(self, max_kl_nats: float = MAX_KL_NATS) -> Thresholds:
        """Return the thresholds of the largest target measured within the bound. Raises: UsageError: if none was."""
        within = [each.target for each in self.measured if each.kl_nats <= max_kl_nats]
        if not within:
            raise UsageError(
                f"no share of neurons can be left out of this model within {max_kl_nats} nats of KL divergence; "
                "give one with --sparsity."
            )
        return self.at(max(within))


def largest_within(measure: Callable[[float], Measurement], max_kl_nats: float = MAX_KL_NATS) -> list[Measurement]:
    """Find the largest target of SHARES within the bound by bisection, and return all measurements."""
    found, low, high = [], 0, len(SHARES)
    while high - low > 1:
        middle = (low + high) // 2
        found.append(measure(SHARES[middle]))
        low, high = (middle, high) if found[-1].kl_nats <= max_kl_nats else (low, middle)
    return found
