"""Compute the angle per position by which rotary position embedding rotates each pair of features.

Sources: RoFormer (arXiv 2104.09864) section 3.2; Llama 3.1's frequency scaling as Meta published it with the weights;
YaRN (arXiv 2309.00071) with its section on dynamic scaling; LongRoPE (arXiv 2402.13753).
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those in training.

    kind: "default" (none), "linear" (every frequency / factor), "llama3" and "yarn" (only slow ones), "dynamic" (a
    larger theta for a longer context) or "longrope" (each frequency / its own factor). The last two change nothing up
    to the original context length, and stretch every position of a longer context.
    """

    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0  # rotations over the original context; slower ones are divided by the factor
    high_frequency_factor: float = 4.0  # rotations over the original context; faster ones do not change
    original_context_tokens: int = 8192
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # divisors for contexts longer than the original
    magnitude: float = 1.0  # factor of cosine and sine
    whole_pairs: bool = True  # whether "yarn" begins and ends its blend at whole pairs
    longest_context_tokens: int = 0  # longest context of "yarn", "dynamic" and "longrope"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Which features of a head rotate, and how fast they rotate."""

    theta: float  # base of the geometric series
    n_features: int  # leading features of a head that rotate (even)
    scaling: RopeScaling = RopeScaling()
    interleaved: bool = False  # adjacent features rotate in the checkpoint; loaded, they are n_features / 2 apart

    def inverse_frequencies(self, context_tokens: int = 0) -> list[float]:
        """Return radians per position for each of the n_features / 2 pairs.

        A position's angles never change while a sequence grows.

        Args:
            context_tokens: length of the longest sequence that fits, not the current length; 0 for the original
                context.
        """
        scaling, plain = self.scaling, _plain(self.theta, self.n_features)
        if scaling.kind == "dynamic":
            return _plain(self.for_context(context_tokens).theta, self.n_features)
        if scaling.kind == "linear":
            return [frequency / scaling.factor for frequency in plain]
        if scaling.kind == "llama3":
            return [_llama3_frequency(frequency, scaling) for frequency in plain]
        if scaling.kind == "yarn":
            return self._yarn_frequencies(plain)
        if scaling.kind == "longrope":
            factors = self.for_context(context_tokens).scaling.short_factors
            return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)]
        return plain

    def for_context(self, context_tokens: int) -> "RopeSpec":
        """Return a rotary embedding that has the angles for `context_tokens` at every context length."""
        scaling, is_long = self.scaling, context_tokens > self.scaling.original_context_tokens
        if scaling.kind == "dynamic":
            theta = self._stretched_theta(context_tokens) if is_long else self.theta
            return replace(self, theta=theta, scaling=replace(scaling, kind="default"))
        factors = scaling.long_factors if is_long else scaling.short_factors
        return replace(self, scaling=replace(scaling, short_factors=factors, long_factors=factors))

    def _stretched_theta(self, context_tokens: int) -> float:
        """Return the theta that makes the slowest pair rotate about as far over this context as over the original."""
        scaling, n = self.scaling, self.n_features
        stretch = scaling.factor * (context_tokens / scaling.original_context_tokens - 1) + 1
        return float(self.theta * stretch ** (n / (n - 2)))

    def _yarn_frequencies(self, plain: list[float]) -> list[float]:
        """Keep fast frequencies, divide slow ones by the factor, and blend linearly, by pair, between them (YaRN)."""
        scaling = self.scaling
        first = self._pair_of_turns(scaling.high_frequency_factor)
        last = self._pair_of_turns(scaling.low_frequency_factor)
        if scaling.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.n_features - 1)
        width = (last - first) or 0.001
        found = []
        for pair, frequency in enumerate(plain):
            divided = min(max((pair - first) / width, 0), 1)
            found.append(divided * frequency / scaling.factor + (1 - divided) * frequency)
        return found

    def _pair_of_turns(self, n_turns: float) -> float:
        """Return the pair, as a fraction, that makes n_turns full turns over the original context."""
        longest = self.scaling.original_context_tokens / (n_turns * 2 * math.pi)
        return self.n_features * math.log(longest) / (2 * math.log(self.theta))


def halves_of_pairs(n: int) -> tuple[int, ...]:
    """Return the order that moves the features of n / 2 adjacent pairs to places that are n / 2 apart."""
    return *range(0, n, 2), *range(1, n, 2)


def _plain(theta: float, n_features: int) -> list[float]:
    return [theta ** (-2 * pair / n_features) for pair in range(n_features // 2)]


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Keep a fast frequency, divide a slow one by the factor, and blend linearly in between (Llama 3)."""
    turns = scaling.original_context_tokens * frequency / (2 * math.pi)  # full turns over the original context
    if turns > scaling.high_frequency_factor:
        return frequency
    if turns < scaling.low_frequency_factor:
        return frequency / scaling.factor
    blend = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
