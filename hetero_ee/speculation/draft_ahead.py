"""Drafting ahead: while the CPU verifies a round, the GPU has the row that most likely follows in its layers.

A round's last row has a likeliest token too, its guess, though no row was made of it. Where all the round's drafts are
right and the guess is what the full model says behind them, the next round's first row has passed layers already; else
it is rolled back as any wrong draft. The rows that wait are brought to the CPU before the guess begins, so that nobody
waits for it. Source: derived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hetero_ee.decoding.sampling import SamplingParams
from hetero_ee.decoding.texts import Ending, Text
from hetero_ee.errors import DeviceMemoryError, UsageError
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.draft_round import DraftRound, stacked
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A row that has passed the first n_layers layers. hidden: (hidden,) behind them."""

    token_id: int
    position: int
    n_layers: int
    hidden: Tensor


class DraftAhead:
    """Where `drafting` wants it and the executor's devices allow it. counts: rows launched and kept."""

    def __init__(
        self, executor: Executor, drafting: Drafting, params: SamplingParams, ending: Ending, counts: DraftCounts
    ) -> None:
        self._executor, self._exit_layer, self._counts = executor, drafting.exit_layer, counts
        self._params, self._ending = params, ending
        most = drafting.exit_layer if drafting.layers_ahead is None else drafting.layers_ahead
        self._most_layers = min(drafting.exit_layer, most) if drafting.drafts_ahead else 0
        self._rows: dict[int, _Ahead] = {}  # by Text.sequence

    def run_later(self, rounds: Sequence[DraftRound]) -> Tensor:
        """All waiting rows through the later layers, (m, hidden); the guessed rows run meanwhile where they can."""
        batch = Batch.joined([round_.rows(0) for round_ in rounds])
        waiting = stacked([state for round_ in rounds for state in round_.hidden])
        first, n_layers = self._exit_layer, self._executor.spec.n_layers
        overlap = self._executor.overlap if self._most_layers else None
        guessed = [round_ for round_ in rounds if overlap is not None and self._may_follow(round_)]
        if overlap is not None and guessed:
            behind = overlap.layers_behind(first)
            if behind > first:
                waiting = self._executor.run(batch, waiting, range(first, behind))
            waiting, first = self._executor.on_cpu(waiting), behind
            self._launch(guessed, overlap.layers_ahead(self._most_layers))
        return self._executor.run(batch, waiting, range(first, n_layers))

    def keeps(self, text: Text) -> bool:
        """Whether the row ahead is that of the text's last token, now that a round has been verified; else, or where
        the text has ended, it is forgotten here, and the cache is the caller's to roll back."""
        row = self._rows.get(text.sequence)
        if row is None:
            return False
        place = len(text.token_ids) - 1, text.token_ids[-1]
        if text.finished or (row.position, row.token_id) != place:
            del self._rows[text.sequence]
            return False
        self._counts.n_ahead_kept += 1
        return True

    def take(self) -> dict[int, tuple[Tensor, int]]:
        """By Text.sequence, of those whose last token's row was kept, its state (hidden,) and the layers it passed."""
        rows, self._rows = self._rows, {}
        return {sequence: (row.hidden, row.n_layers) for sequence, row in rows.items()}

    def drop(self, texts: Sequence[Text]) -> None:
        """Rolls back every row ahead of these texts."""
        cache = self._executor.cache
        for text in texts:
            row = self._rows.pop(text.sequence, None)
            if row is not None and text.cached_as in cache.sequences:
                cache.cut(text.cached_as, row.position)

    def _may_follow(self, round_: DraftRound) -> bool:
        """Whether a row behind all of the round's could be one of the text's."""
        n_left = round_.text.tokens_left(self._params, self._ending)
        return round_.guess is not None and len(round_.token_ids) < n_left

    def _launch(self, rounds: Sequence[DraftRound], n_layers: int) -> None:
        """The guessed rows through the first layers; nobody waits for them."""
        parts = [_guessed_row(round_) for round_ in rounds]
        try:
            states = self._executor.run(Batch.joined(parts), None, range(n_layers))
        except (DeviceMemoryError, UsageError):  # of memory, or of a cache that all texts share
            # No reason to fail, where no smaller plan was made for them; there will hardly be room for more later.
            self._most_layers = 0
            return
        for round_, part, state in zip(rounds, parts, states, strict=True):
            self._rows[round_.text.sequence] = _Ahead(part.token_ids[0], part.positions[0], n_layers, state)
        self._counts.n_ahead += len(rounds)


def _guessed_row(round_: DraftRound) -> Batch:
    assert round_.guess is not None
    position = round_.first_position + len(round_.token_ids)
    return Batch.of_sequence(round_.text.cached_as, position, [round_.guess])
