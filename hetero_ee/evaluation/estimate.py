"""A figure over several texts with its confidence interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_RESAMPLES = 2000
TAIL = 0.025  # on either side of the interval

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the bounds of its 95 % interval, which are None for a single text."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio(
    parts: Sequence[float], wholes: Sequence[float], seed: int, of: Callable[[Array], Array] = lambda ratios: ratios
) -> Estimate | None:
    """Return of(sum of parts / sum of wholes), with one of each per text, or None if the wholes are 0.

    The interval is a percentile bootstrap over the texts, not over tokens, which depend on each other (Efron and
    Tibshirani,
    An Introduction to the Bootstrap, 1993, chapter 13). The same seed draws the same texts for every figure.
    """
    pairs = np.array([parts, wholes], dtype=np.float64)
    if not pairs[1].sum():
        return None
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        value = float(of(np.asarray(pairs[0].sum() / pairs[1].sum())))
        n_texts = len(parts)
        if n_texts < 2:
            return Estimate(value)
        drawn = np.random.default_rng(seed).integers(n_texts, size=(N_RESAMPLES, n_texts))
        sums = pairs[:, drawn].sum(axis=2)
        found = of(sums[0] / sums[1])[sums[1] > 0]
    low, high = np.quantile(found, (TAIL, 1 - TAIL), method="inverted_cdf")  # no interpolation: perplexity may be inf
    return Estimate(value, float(low), float(high))
