"""DraftStatistics: what drafting brought, counted while it runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_ee.planning.plan import EXIT, NGRAM, SEQUENCE


@dataclass(frozen=True, slots=True)
class OriginCounts:
    """Drafts of one origin. n_checked: those that followed right ones only, so that the full model judged them.

    n_accepted: those it agreed with.
    """

    origin: str
    n_drafted: int
    n_checked: int
    n_accepted: int

    @property
    def precision(self) -> float:
        """Share of judged drafts that were right, 0 for none."""
        return self.n_accepted / self.n_checked if self.n_checked else 0.0


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """Counts of all texts together, each text's first token left out: its prompt's pass gave it.

    n_passes: of the later layers; each takes a round of every text that is not finished. n_rounds: of single texts.
    n_rows: verified. n_tokens: what came out. drafted_runs[n], accepted_runs[n], checked_runs[n]: rounds with n
    drafts, with n accepted ones, and with n that the full model judged. origins: by where drafts come from.
    known_after[n]: tokens known after n layers, those of right exits after fewer than all. n_ahead: rows of guesses
    that began while the rows before them were verified; n_ahead_kept: those that were right.
    """

    n_layers: int
    exit_layer: int
    n_passes: int
    n_rounds: int
    n_rows: int
    n_tokens: int
    drafted_runs: tuple[int, ...]
    accepted_runs: tuple[int, ...]
    checked_runs: tuple[int, ...]
    origins: tuple[OriginCounts, ...]
    known_after: tuple[int, ...]
    n_ahead: int = 0
    n_ahead_kept: int = 0

    @property
    def n_drafted(self) -> int:
        return sum(counts.n_drafted for counts in self.origins)

    @property
    def n_accepted(self) -> int:
        return sum(counts.n_accepted for counts in self.origins)

    @property
    def acceptance(self) -> float:
        """Share of drafts that became tokens, 0 for none."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens for each time the later layers' weights were read, 0 for none."""
        return self.n_tokens / self.n_passes if self.n_passes else 0.0

    @property
    def mean_exit_depth(self) -> float:
        """Layers after which a token was known; 0 for none."""
        return sum(n * count for n, count in enumerate(self.known_after)) / self.n_tokens if self.n_tokens else 0.0


@dataclass(slots=True)
class DraftCounts:
    """Counts rounds as they end; `statistics` is what they amount to so far."""

    n_passes: int = 0
    n_tokens: int = 0
    n_ahead: int = 0
    n_ahead_kept: int = 0
    _drafted: Counter[str] = field(default_factory=Counter)
    _checked: Counter[str] = field(default_factory=Counter)
    _accepted: Counter[str] = field(default_factory=Counter)
    _drafted_runs: Counter[int] = field(default_factory=Counter)
    _accepted_runs: Counter[int] = field(default_factory=Counter)
    _checked_runs: Counter[int] = field(default_factory=Counter)
    _depths: Counter[int] = field(default_factory=Counter)

    def add_round(self, origins: Sequence[str], depths: Sequence[int], n_accepted: int, n_tokens: int) -> None:
        """One text's round. origins, depths: of its drafts, in order, of which the first n_accepted were right; the
        layers after which each was known."""
        n_checked = min(n_tokens, len(origins))  # each token came with a judgement of the draft in its place
        for place, (origin, depth) in enumerate(zip(origins, depths, strict=True)):
            self._drafted[origin] += 1
            self._checked[origin] += place < n_checked
            self._accepted[origin] += place < n_accepted
            self._depths[depth] += place < n_accepted
        self._drafted_runs[len(origins)] += 1
        self._accepted_runs[n_accepted] += 1
        self._checked_runs[n_checked] += 1
        self.n_tokens += n_tokens

    def statistics(self, n_layers: int, exit_layer: int) -> DraftStatistics:
        """The counts so far."""
        origins = (
            OriginCounts(name, self._drafted[name], self._checked[name], self._accepted[name])
            for name in (EXIT, SEQUENCE, NGRAM)
            if self._drafted[name]
        )
        n_rounds = self._drafted_runs.total()
        known = self._depths + Counter({n_layers: self.n_tokens - self._depths.total()})
        return DraftStatistics(
            n_layers,
            exit_layer,
            self.n_passes,
            n_rounds,
            n_rounds + self._drafted.total(),
            self.n_tokens,
            _histogram(self._drafted_runs),
            _histogram(self._accepted_runs),
            _histogram(self._checked_runs),
            tuple(origins),
            tuple(known[n] for n in range(n_layers + 1)),
            self.n_ahead,
            self.n_ahead_kept,
        )


def _histogram(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[n] for n in range(max(counts, default=-1) + 1))
