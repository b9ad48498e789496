"""Rotary position embedding: which angle each pair of features turns by per position.

Sources: RoFormer (arXiv 2104.09864) section 3.2; Llama 3.1's frequency scaling as Meta published it with the weights.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How frequencies are stretched for contexts longer than the one trained on first.

    kind: "default" (none), "linear" (every frequency / factor), "llama3" (only the slow ones) or "longrope" (each
    frequency / its short factor, arXiv 2402.13753; the long ones begin beyond the original context, which is not
    supported).
    """

    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192
    short_factors: tuple[float, ...] = ()
    magnitude: float = 1.0  # of cosine and sine


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Which features of a head turn, and how fast."""

    theta: float  # base of the geometric series
    n_features: int  # leading features of a head that turn (even)
    scaling: RopeScaling = RopeScaling()

    def inverse_frequencies(self) -> list[float]:
        """Radians per position for each of the n_features / 2 pairs."""
        plain = [self.theta ** (-2 * pair / self.n_features) for pair in range(self.n_features // 2)]
        if self.scaling.kind == "linear":
            return [frequency / self.scaling.factor for frequency in plain]
        if self.scaling.kind == "llama3":
            return [_llama3_frequency(frequency, self.scaling) for frequency in plain]
        if self.scaling.kind == "longrope":
            return [frequency / factor for frequency, factor in zip(plain, self.scaling.short_factors, strict=True)]
        return plain


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Fast turns stay, slow ones are divided by the factor, those between are blended linearly."""
    turns = scaling.original_context_tokens * frequency / (2 * math.pi)  # full turns over the original context
    if turns > scaling.high_frequency_factor:
        return frequency
    if turns < scaling.low_frequency_factor:
        return frequency / scaling.factor
    blend = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
