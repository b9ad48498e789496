"""One measured quantity with its spread and where it comes from."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a measurement comes from."""

    command: str  # that made it
    date: str  # ISO
    versions: str  # of the software in use


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median and quantiles of samples, all above 0; of a derived quantity the quantiles are the value.

    Raises ValueError where they are out of order.
    """

    value: float
    unit: str  # "s" or "B/s"
    p20: float
    p80: float
    count: int  # of samples, 0 where derived
    origin: Origin

    def __post_init__(self) -> None:
        if not (math.isfinite(self.p80) and 0 < self.p20 <= self.value <= self.p80):
            raise ValueError(f"0 < p20 {self.p20:.4g} <= value {self.value:.4g} <= p80 {self.p80:.4g} does not hold")
        if self.count < 0:
            raise ValueError(f"count is {self.count}, expected 0 or more")

    @property
    def spread(self) -> float:
        """Width from p20 to p80 as a share of the value."""
        return (self.p80 - self.p20) / self.value


def measured(samples: Sequence[float], unit: str, origin: Origin) -> Measurement:
    """The measurement that `samples`, at least one, amount to."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Measurement(
        value=statistics.median(ordered),
        unit=unit,
        p20=ordered[math.floor(0.2 * last)],
        p80=ordered[math.ceil(0.8 * last)],
        count=len(ordered),
        origin=origin,
    )


def derived(value: float, unit: str, origin: Origin) -> Measurement:
    """A quantity that was computed, not measured."""
    return Measurement(value, unit, value, value, 0, origin)
