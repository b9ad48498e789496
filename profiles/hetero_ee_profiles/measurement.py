"""One measured figure with its spread and where it comes from."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where figures come from: the command that printed them, the day (ISO), and the versions in use."""

    command: str
    date: str
    versions: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """value: the median of `count` samples, in `unit`; p20 and p80: their quantiles. All above 0.

    Of a derived figure count is 0 and the quantiles are the value. Raises ValueError.
    """

    value: float
    unit: str
    p20: float
    p80: float
    count: int
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
    """A figure that was computed, not measured."""
    return Measurement(value, unit, value, value, 0, origin)
