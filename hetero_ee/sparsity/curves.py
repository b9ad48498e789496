"""What calibration knows of a model's neurons: their scores' quantiles, what leaving them out costs, and where it was
measured against the dense model."""

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
    """Of one target, on text that nothing was fitted to."""

    target: float
    share: float  # of neurons that were left out, those at 0 among them
    kl_nats: float  # mean KL divergence of the next-token distribution, dense to sparse

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not (0 < self.target <= SHARES[-1] and 0 <= self.share <= 1 and 0 <= self.kl_nats < math.inf):
            raise ValueError(f"it measures {self.share} left out and {self.kl_nats} nats at {self.target}")


@dataclass(frozen=True, slots=True, eq=False)
class SparsityCurves:
    """thresholds, errors: fp32 (n_layers, n_shares), of each layer with so many of its neurons left out, see SHARES.

    An error is the mean over tokens of what the FFN's sum lacks, squared, over the residual stream behind it, squared.
    """

    thresholds: NDArray[np.float32]
    errors: NDArray[np.float32]
    measured: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name in ("thresholds", "errors"):
            values = getattr(self, name)
            if values.dtype != np.float32 or values.ndim != 2 or values.shape[1] != len(SHARES):
                raise ValueError(f"its {name} have another type or shape")
            if not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(f"its {name} have a value that is negative or not finite")
        if len(self.thresholds) != len(self.errors) or (np.diff(self.thresholds, axis=1) < 0).any():
            raise ValueError("its thresholds don't ascend, or are of other layers than its errors")

    @property
    def active_share(self) -> float:
        """Of all neurons, what is not 0: to a step of SHARES, and never less than is beyond the last of them."""
        n_zero = np.maximum(1, (self.thresholds == 0).sum(axis=1))
        return 1 - float(np.mean(np.array(SHARES)[n_zero - 1]))

    def at(self, target: float) -> Thresholds:
        """Of a target share, from above 0 to the last of SHARES, dealt out over the layers."""
        shares = dealt_shares(self.errors, target)
        between = (np.interp(share, SHARES, row) for share, row in zip(shares, self.thresholds, strict=True))
        return Thresholds(target, tuple(float(np.float32(threshold)) for threshold in between))

    def auto(self, max_kl_nats: float = MAX_KL_NATS) -> Thresholds:
        """Of the largest target that was measured within the bound. Raises UsageError where none was."""
        within = [each.target for each in self.measured if each.kl_nats <= max_kl_nats]
        if not within:
            raise UsageError(
                f"no share of neurons can be left out of this model within {max_kl_nats} nats of KL divergence; "
                "give one with --sparsity."
            )
        return self.at(max(within))


def largest_within(measure: Callable[[float], Measurement], max_kl_nats: float = MAX_KL_NATS) -> list[Measurement]:
    """What was measured, by halving, to find the largest target of SHARES within the bound."""
    found, low, high = [], 0, len(SHARES)
    while high - low > 1:
        middle = (low + high) // 2
        found.append(measure(SHARES[middle]))
        low, high = (middle, high) if found[-1].kl_nats <= max_kl_nats else (low, middle)
    return found
