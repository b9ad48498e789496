"""Counters for speculative and early-exit decoding: drafts, accepted drafts, and the depth of each token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_ee.decoding.result import EXIT


@dataclass(frozen=True, slots=True)
class OriginCounts:
    """Counts of the drafts from one origin."""

    origin: str
    n_drafted: int
    n_checked: int  # drafts after right ones only, which the full model verified
    n_accepted: int  # drafts that the full model agreed with

    @property
    def precision(self) -> float:
        """Share of verified drafts that were right, 0 if none was verified."""
        return self.n_accepted / self.n_checked if self.n_checked else 0.0


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """Draft counts summed over all requests. Excludes each request's first token, which prefill produces."""

    n_layers: int
    exit_layer: int
    n_passes: int  # passes through the later layers, each with a step of every request
    n_steps: int  # steps, counted for each request
    n_verified: int  # tokens verified
    n_tokens: int  # tokens emitted
    drafted_runs: tuple[int, ...]  # [n]: steps with n drafts
    accepted_runs: tuple[int, ...]  # [n]: steps with n accepted drafts
    origins: tuple[OriginCounts, ...]  # by where drafts come from
    n_ahead: int = 0  # next-token guesses that began while the tokens before them were verified
    n_ahead_kept: int = 0  # right guesses
    prompt_s: dict[str, float] = field(default_factory=dict)  # seconds in which each source read prompts

    def reading_shares(self, prompt_s: float) -> dict[str, float]:
        """Return, by origin, the share of the prompts' time that its draft source needed to read them."""
        return {origin: seconds / (prompt_s or 1.0) for origin, seconds in self.prompt_s.items()}

    @property
    def n_drafted(self) -> int:
        return sum(counts.n_drafted for counts in self.origins)

    @property
    def n_accepted(self) -> int:
        return sum(counts.n_accepted for counts in self.origins)

    @property
    def acceptance(self) -> float:
        """Share of drafts that were accepted, 0 without drafts."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per pass through the later layers, 0 without passes."""
        return self.n_tokens / self.n_passes if self.n_passes else 0.0

    @property
    def known_after(self) -> dict[int, int]:
        """Number of tokens by depth: the exit layer for accepted early-exit drafts, all layers for other tokens."""
        n_exits = sum(counts.n_accepted for counts in self.origins if counts.origin == EXIT)
        return {self.exit_layer: n_exits, self.n_layers: self.n_tokens - n_exits}

    @property
    def mean_exit_depth(self) -> float:
        """Mean of `known_after`: layers after which a token was known, 0 without tokens."""
        return sum(n * count for n, count in self.known_after.items()) / self.n_tokens if self.n_tokens else 0.0


@dataclass(slots=True)
class DraftCounts:
    """Counters that each finished draft-verify step updates."""

    n_passes: int = 0
    n_tokens: int = 0
    n_ahead: int = 0
    n_ahead_kept: int = 0
    _prompt_s: dict[str, float] = field(default_factory=dict)
    _drafted: Counter[str] = field(default_factory=Counter)
    _checked: Counter[str] = field(default_factory=Counter)
    _accepted: Counter[str] = field(default_factory=Counter)
    _drafted_runs: Counter[int] = field(default_factory=Counter)
    _accepted_runs: Counter[int] = field(default_factory=Counter)

    def add_reading(self, origin: str, seconds: float) -> None:
        """Add the seconds that a draft source needed to read a chunk of a prompt."""
        self._prompt_s[origin] = self._prompt_s.get(origin, 0.0) + seconds

    def add_step(self, origins: Sequence[str], n_accepted: int, n_tokens: int) -> None:
        """Count a request's step with the origins of its drafts, in order, of which the first n_accepted were right."""
        self._drafted.update(origins)
        self._checked.update(origins[:n_tokens])  # each token came with a judgement of the draft in its place
        self._accepted.update(origins[:n_accepted])
        self._drafted_runs[len(origins)] += 1
        self._accepted_runs[n_accepted] += 1
        self.n_tokens += n_tokens

    def statistics(self, n_layers: int, exit_layer: int) -> DraftStatistics:
        n_steps = self._drafted_runs.total()
        return DraftStatistics(
            n_layers,
            exit_layer,
            self.n_passes,
            n_steps,
            n_steps + self._drafted.total(),
            self.n_tokens,
            _histogram(self._drafted_runs),
            _histogram(self._accepted_runs),
            tuple(
                OriginCounts(name, self._drafted[name], self._checked[name], self._accepted[name])
                for name in self._drafted
            ),
            self.n_ahead,
            self.n_ahead_kept,
            dict(self._prompt_s),
        )


def _histogram(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[n] for n in range(max(counts, default=-1) + 1))


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
        """Number of tokens that skipped layers."""
        return self.n_tokens - self.depths[-1]

    @property
    def mean_depth(self) -> float:
        """Mean number of layers after which a token was emitted; 0 without tokens."""
        return sum(depth * n for depth, n in enumerate(self.depths)) / self.n_tokens if self.n_tokens else 0.0

    @property
    def judged_per_token(self) -> float:
        """Mean number of exit layers that judged a token, 0 without tokens."""
        return sum(self.judged) / self.n_tokens if self.n_tokens else 0.0

    def passes_per_token(self, layer: int) -> float:
        """Return how often the layer's weights were read per emitted token; 0 without tokens."""
        return sum(self.reached[layer + 1 :]) / self.n_tokens if self.n_tokens else 0.0


@dataclass(slots=True)
class ExitCounts:
    """Counters that each emitted token and each finished early-exit step updates."""

    n_judged: Counter[int] = field(default_factory=Counter)  # by exit layer
    _depths: Counter[int] = field(default_factory=Counter)
    _reached: Counter[int] = field(default_factory=Counter)

    def add_token(self, depth: int) -> None:
        self._depths[depth] += 1

    def add_step(self, depth: int) -> None:
        self._reached[depth] += 1

    def statistics(self, n_layers: int) -> ExitStatistics:
        found = (
            tuple(counts[n] for n in range(n_layers + 1)) for counts in (self._depths, self._reached, self.n_judged)
        )
        return ExitStatistics(*found)
