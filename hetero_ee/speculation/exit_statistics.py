"""ExitStatistics: after how many layers tokens were emitted."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ExitStatistics:
    """Exit counts summed over all requests. Excludes each request's first token, which prefill produces."""

    depths: tuple[int, ...]  # [n]: tokens emitted after n layers
    reached: tuple[int, ...]  # [n]: steps whose deepest token passed n layers; a step takes a token of every request
    judged: tuple[int, ...]  # [n]: tokens judged after n layers

    @property
    def n_layers(self) -> int:
        return len(self.depths) - 1

    @property
    def n_tokens(self) -> int:
        return sum(self.depths)

    @property
    def n_exited(self) -> int:
        """Tokens that skipped layers."""
        return self.n_tokens - self.depths[-1]

    @property
    def mean_depth(self) -> float:
        """Mean number of layers after which a token was emitted; 0 without tokens."""
        return sum(depth * n for depth, n in enumerate(self.depths)) / self.n_tokens if self.n_tokens else 0.0

    @property
    def judged_per_token(self) -> float:
        """Exit layers at which a token was judged, on average; 0 for none."""
        return sum(self.judged) / self.n_tokens if self.n_tokens else 0.0

    def passes_per_token(self, layer: int) -> float:
        """Return how often the layer's weights were read per emitted token; 0 without tokens."""
        return sum(self.reached[layer + 1 :]) / self.n_tokens if self.n_tokens else 0.0


@dataclass(slots=True)
class ExitCounts:
    """Counts steps as they end; `statistics` is what they amount to so far."""

    n_judged: Counter[int] = field(default_factory=Counter)  # by exit layer
    _depths: Counter[int] = field(default_factory=Counter)
    _reached: Counter[int] = field(default_factory=Counter)

    def add_token(self, depth: int) -> None:
        """A token was given out after so many layers."""
        self._depths[depth] += 1

    def add_step(self, depth: int) -> None:
        """A step's deepest token passed so many layers."""
        self._reached[depth] += 1

    def statistics(self, n_layers: int) -> ExitStatistics:
        """The counts so far."""
        found = (
            tuple(counts[n] for n in range(n_layers + 1)) for counts in (self._depths, self._reached, self.n_judged)
        )
        return ExitStatistics(*found)
