"""Candidate tokens from a draft head or draft model, known before any layer has run.

Source: SpecEE (arXiv 2504.08850), section 4. The head was trained on states after the last layer. For a token that has
exited, it gets the state at the exit, as in the paper.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import nan

import torch
from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.errors import DeviceLostError, DeviceMemoryError, UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.speculation.exits.features import likeliest
from hetero_ee.speculation.sources.source import DraftsFromStates, DraftSource


class DraftCandidates:
    """Candidates from a draft head. Without memory for the head, `warn` is called and tokens are judged without it."""

    def __init__(self, source: DraftSource, warn: Callable[[str], None]) -> None:
        self._source, self._warn = source, warn

    def of(self, executor: Executor, request: Request) -> Tensor | None:
        """Return candidates for the next token, int64 (k,), or None if the head can't draft."""
        found: list[Tensor] = []

        def choose(state: Tensor, end: DraftEnd, history: Sequence[int], by: DraftsFromStates | None = None) -> Drafted:
            best = likeliest((by or executor).draft_logits(state, end))
            if not best.is_finite[0]:
                return Drafted(NO_TOKEN, nan)
            ids = torch.from_numpy(best.token_ids[0])
            found.append(ids if end.vocabulary is None else end.vocabulary.token_ids[ids])
            return Drafted(int(found[0][0]), 1.0)

        with self._surviving(), closing(self._source.drafts(request.kv_sequence, request.token_ids, choose)) as drafts:
            next(drafts, None)
        return found[0] if found else None

    def read_prompt(self, batch: Batch, normed: Tensor, *captured: Tensor) -> None:
        """Read a chunk of one sequence's prompt. See Observe."""
        with self._surviving():
            self._source.truncate(batch.sequences[0], batch.positions[0])
            self._source.read_prompt(batch.sequences[0], batch.positions[0], batch.token_ids, normed)

    def observe(self, sequence: int, position: int, token_id: int, normed: Tensor) -> None:
        """Pass a token to the head, with the normed state (1, hidden) from which the next token was chosen."""
        with self._surviving():
            self._source.observe(sequence, position, [token_id], normed)

    def close(self, sequence: int) -> None:
        self._source.close(sequence)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except (DeviceMemoryError, DeviceLostError, UsageError) as error:
            self._warn(f"{error} Exits are judged without the draft head.")
