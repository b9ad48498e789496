"""The draft-verify step of one request, and the sampling of drafts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.decoding.result import GRAMMAR
from hetero_ee.decoding.sampling import RememberedNoise
from hetero_ee.runtime.choice import all_finite, confidence_of
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd, DraftNoise
from hetero_ee.speculation.pending import PendingToken
from hetero_ee.speculation.sources.source import ABSENT, DraftsFromStates


@dataclass(slots=True, eq=False)
class DraftStep:
    """Drafts of one request that are verified together."""

    request: Request
    max_drafts: int
    tokens: list[PendingToken]  # the request's last token, then the drafts
    origins: list[str] = field(default_factory=list)  # the proposer of each draft
    chances: list[float] = field(default_factory=list)  # chance of each draft to be right if those before it are
    judged: dict[int, tuple[int, float]] = field(
        default_factory=dict
    )  # by i: token and confidence after tokens[i], drafted or not
    next_guess: int | None = None  # likeliest token after the last one, if it was not drafted

    @property
    def history(self) -> list[int]:
        """Token ids of the request, followed by the drafts of this step."""
        return [*self.request.token_ids, *(token.token_id for token in self.tokens[1:])]

    @property
    def has_room(self) -> bool:
        """Whether another draft may follow."""
        return len(self.origins) < self.max_drafts

    def end(self) -> None:
        """Stop drafting in this step."""
        self.max_drafts = len(self.origins)

    def add(self, token_id: int, origin: str, chance: float) -> None:
        last = self.tokens[-1]
        self.tokens.append(PendingToken(token_id, last.sequence, last.position + 1))
        self.origins.append(origin)
        self.chances.append(chance)
        self.next_guess = None

    def add_forced(self) -> bool:
        """Add the drafts that the grammar forces and return whether there are any. A complete grammar ends the step."""
        if self.request.constraint is None:
            return False
        forced = self.request.forced_after(self.history)[: self.max_drafts - len(self.origins)]
        for token_id in forced:
            self.add(token_id, GRAMMAR, 1.0)
        if self.request.is_complete_after(self.history):
            self.end()
        return bool(forced)

    def judge(self, token_id: int, confidence: float) -> None:
        """Record the likeliest token after the step's last token, whether or not it becomes a draft, and its
        confidence."""
        self.judged[len(self.tokens) - 1] = token_id, confidence


class DraftSampler:
    """Chooses drafts with each request's sampling settings and with the noise of verification at the same position."""

    def __init__(self) -> None:
        self.noise = RememberedNoise()

    def choose(self, request: Request, history: Sequence[int], logits: Tensor) -> int:
        """Sample the request's token after this history from logits (vocab,)."""
        return request.choose(logits, history, self.noise.of_draft)

    def drafted(
        self,
        executor: DraftsFromStates,
        hidden: Tensor,
        end: DraftEnd,
        rows: Sequence[tuple[Request, Sequence[int]]],
        *,
        is_verified: bool = True,
    ) -> list[Drafted]:
        """Sample a token after each of the states (m, hidden), and return it with its confidence.

        A GPU that holds the head samples there, but without filters. The CPU samples with all of the request's settings
        in three cases: penalties, a bias or a grammar change the logits; the CPU has the logits anyway; or the token
        will not be verified.

        Args:
            rows: The request of each state, and its token ids up to that state.
        """
        by_gpu = executor.head_on_gpu and not any(
            request.params.changes_logits or request.constraint is not None for request, _ in rows
        )
        if by_gpu and (is_verified or not any(request.params.is_filtered for request, _ in rows)):
            return executor.draft(hidden, [self._noise_of(*row) for row in rows], end)
        logits = executor.draft_logits(hidden, end)
        if end.vocabulary is not None:
            whole = torch.full((len(logits), executor.spec.vocab_size), ABSENT)
            logits = whole.index_copy_(1, end.vocabulary.token_ids, logits)
        return [self._chosen(*row, end, each) for row, each in zip(rows, logits, strict=True)]

    def _noise_of(self, request: Request, history: Sequence[int]) -> DraftNoise:
        return DraftNoise(request.params.temperature, request.params.seed, request.index, len(history))

    def _chosen(self, request: Request, history: Sequence[int], end: DraftEnd, logits: Tensor) -> Drafted:
        if not all_finite(logits):
            return Drafted(NO_TOKEN, math.nan)
        token_id = self.choose(request, history, logits)
        allowed = request.allowed_after(history)
        if allowed is not None and end.judge is None:  # a judge was fitted to the model's own logits
            logits = logits.masked_fill(torch.from_numpy(~allowed), ABSENT)
        return Drafted(token_id, confidence_of(logits, token_id, end.judge))
