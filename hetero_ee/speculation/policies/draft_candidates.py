"""Candidate tokens from a draft head or draft model, known before any layer has run.

Source: SpecEE (arXiv 2504.08850), section 4. The head reads the states of tokens that have passed every layer, as in
exact mode. After tokens that have exited it continues from its own predictions, where the paper gives it the state at
the exit. So heads that read states of several layers (EAGLE-3) work too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.features import N_CANDIDATES, likeliest
from hetero_ee.speculation.sources.source import DraftsFromStates, DraftSource


class DraftCandidates:
    """Candidates from a draft source. If the source fails, `warn` is called and tokens are judged without it."""

    def __init__(self, source: DraftSource, warn: Callable[[str], None], title: str = "") -> None:
        """Create candidates. `title` is the source's name for people."""
        self.source, self._warn, self.title = source, warn, title or source.name

    def of(self, executor: Executor, sequence: int, token_ids: Sequence[int]) -> Tensor | None:
        """Return candidates for the token after these, int64 (k,), or None if the source can't draft."""
        found: list[Tensor] = []

        def choose(state: Tensor, end: DraftEnd, history: Sequence[int], by: DraftsFromStates | None = None) -> Drafted:
            best = likeliest((by or executor).draft_logits(state, end))
            if not best.is_finite[0]:
                return Drafted(NO_TOKEN, nan)
            ids = torch.from_numpy(best.token_ids[0])
            found.append(ids if end.vocabulary is None else end.vocabulary.token_ids[ids])
            return Drafted(int(found[0][0]), 1.0)

        with self.surviving(), closing(self.source.drafts(sequence, token_ids, choose)) as drafts:
            next(drafts, None)
        return found[0] if found else None

    def along(self, executor: Executor, token_ids: Sequence[int], states: Sequence[Tensor]) -> NDArray[np.int64]:
        """Return candidates (m, k) for the token after each of these except the first, -1 if the source can't draft.

        Args:
            states: (1 + m, hidden) of all tokens, see DraftSource.observe.
        """
        found = np.full((len(token_ids) - 1, N_CANDIDATES), -1, np.int64)
        sequence = executor.cache.open_new()  # a number that no other sequence has
        try:
            for last in range(1, len(token_ids)):
                first = 0 if last == 1 else last - 1
                batch = Batch.of_sequence(sequence, first, list(token_ids[first:last]))
                self.observe(batch, *(state[first:last] for state in states))
                ids = self.of(executor, sequence, token_ids[: last + 1])
                if ids is not None:
                    found[last - 1] = ids.numpy()
        finally:
            self.close(sequence)
            executor.cache.close(sequence)
        return found

    def read_prompt(self, batch: Batch, normed: Tensor, *captured: Tensor) -> None:
        """Read a chunk of one sequence's prompt. See Observe."""
        with self.surviving():
            self.source.truncate(batch.sequences[0], batch.positions[0])
            self.source.read_prompt(batch.sequences[0], batch.positions[0], batch.token_ids, normed, *captured)

    def observe(self, batch: Batch, normed: Tensor, *captured: Tensor) -> None:
        """Pass tokens of one sequence that have passed every layer. See Observe."""
        with self.surviving():
            self.source.observe(batch.sequences[0], batch.positions[0], batch.token_ids, normed, *captured)

    def close(self, sequence: int) -> None:
        self.source.close(sequence)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        try:
            yield
        except (DeviceMemoryError, DeviceLostError, UsageError) as error:
            self._warn(f"{error} Exits are judged without drafts.")
