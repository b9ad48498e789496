"""Measurement: one measured quantity with its spread and origin."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """The program, date and software versions that a measurement comes from."""

    command: str  # that measured or derived it
    date: str  # ISO
    versions: str  # of the software in use


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median and quantiles of positive samples. For a derived quantity they all equal the value.

    Raises:
        ValueError: if they don't ascend from p20 to p80.
    """

    value: float
    unit: str  # "s" or "B/s"
    p20: float
    p80: float
    count: int  # of samples, 0 if derived
    origin: Origin

    def __post_init__(self) -> None:
        if not (math.isfinite(self.p80) and 0 < self.p20 <= self.value <= self.p80):
            found = f"{self.p20:.4g}, {self.value:.4g} and {self.p80:.4g}"
            raise ValueError(f"p20, value and p80 must be finite, positive and ascending, not {found}")
        if self.count < 0:
            raise ValueError(f"count is {self.count}, expected 0 or more")

    @property
    def spread(self) -> float:
        """Distance from p20 to p80, relative to the value."""
        return (self.p80 - self.p20) / self.value


def measured(samples: Sequence[float], unit: str, origin: Origin) -> Measurement:
    """Return the median and quantiles of one or more samples."""
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
    """Return a measurement without samples, for a quantity that was computed."""
    return Measurement(value, unit, value, value, 0, origin)
