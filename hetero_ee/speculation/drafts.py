"""The draft-verify step of one request, and the sampling of drafts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero_ee.decoding.requests import Request
from hetero_ee.decoding.result import GRAMMAR
from hetero_ee.decoding.sampling import RememberedNoise
from hetero_ee.kv.batch import path_of
from hetero_ee.runtime.choice import all_finite, confidence_of
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd, DraftNoise
from hetero_ee.speculation.pending import PendingToken
from hetero_ee.speculation.sources.source import ABSENT, DraftsFromStates


@dataclass(slots=True, eq=False)
class DraftStep:
    """Drafts of one request that are verified together: a chain, or a tree of several drafts after the same token."""

    request: Request
    max_drafts: int
    tokens: list[PendingToken]  # the request's last token, then the drafts, each after its parent
    origins: list[str] = field(default_factory=list)  # the proposer of each draft
    chances: list[float] = field(default_factory=list)  # chance of each draft to be right if those before it are
    parents: list[int] = field(default_factory=list)  # of each draft, the index in `tokens` of the token before it
    judged: dict[int, list[tuple[int, float]]] = field(
        default_factory=dict
    )  # by i: tokens and confidences after tokens[i], drafted or not
    next_guess: int | None = None  # likeliest token after the last one, if it was not drafted

    @property
    def history(self) -> list[int]:
        """Token ids of the request, followed by the drafts up to this step's last one."""
        return [*self.request.token_ids, *(self.tokens[index].token_id for index in self.path(len(self.origins))[1:])]

    def path(self, index: int) -> list[int]:
        """Return the indices of tokens[0] .. tokens[index] along the parents."""
        found = [index]
        while found[-1]:
            found.append(self.parents[found[-1] - 1])
        return found[::-1]

    def paths(self) -> list[list[int]]:
        """Return the indices of each path from tokens[0] to a token without drafts after it."""
        return [self.path(index) for index in range(len(self.tokens)) if index not in self.parents]

    def keep(self, indices: Sequence[int]) -> None:
        """Keep these tokens, ascending and with their parents, in the slots from that of tokens[0] on."""
        new, first = {old: place for place, old in enumerate(indices)}, self.tokens[0].position
        parents = [new[self.parents[old - 1]] for old in indices[1:]]
        self.tokens = [self.tokens[old] for old in indices]
        for place, (token, parent) in enumerate(zip(self.tokens[1:], parents, strict=True), 1):
            token.path = path_of(self.tokens[parent].path, first + place, token.position)
        self.origins = [self.origins[old - 1] for old in indices[1:]]
        self.chances = [self.chances[old - 1] for old in indices[1:]]
        self.judged = {new[old]: judged for old, judged in self.judged.items() if old in new}
        self.parents = parents

    def child(self, index: int, token_id: int) -> int | None:
        """Return the index of the draft that follows tokens[index] and has this token id, None if no draft does."""
        drafts = enumerate(zip(self.parents, self.tokens[1:], strict=True), 1)
        return next((at for at, (parent, each) in drafts if parent == index and each.token_id == token_id), None)

    @property
    def has_room(self) -> bool:
        """Whether another draft may follow."""
        return len(self.origins) < self.max_drafts

    def end(self) -> None:
        """Stop drafting in this step."""
        self.max_drafts = len(self.origins)

    def add(self, token_id: int, origin: str, chance: float, parent: int | None = None) -> int:
        """Add a draft after tokens[parent], by default the last one, and return its index."""
        parent = len(self.tokens) - 1 if parent is None else parent
        before, slot = self.tokens[parent], self.tokens[0].position + len(self.tokens)
        position = before.position + 1
        self.tokens.append(PendingToken(token_id, before.sequence, position, path=path_of(before.path, slot, position)))
        self.origins.append(origin)
        self.chances.append(chance)
        self.parents.append(parent)
        self.next_guess = None
        return len(self.origins)

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

    def judge(self, token_id: int, confidence: float, parent: int | None = None) -> None:
        """Record a likely token after tokens[parent], by default the step's last token, whether or not it becomes a
        draft, and its confidence."""
        self.judged.setdefault(len(self.tokens) - 1 if parent is None else parent, []).append((token_id, confidence))


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
        logits = _all_logits(executor, hidden, end)
        return [self._chosen(*row, end, each) for row, each in zip(rows, logits, strict=True)]

    def several(
        self,
        executor: DraftsFromStates,
        hidden: Tensor,
        end: DraftEnd,
        rows: Sequence[tuple[Request, Sequence[int]]],
        n: int,
    ) -> list[list[Drafted]]:
        """Return the n tokens that sampling prefers after each of the states (m, hidden), the best one first.

        All of them are chosen with the noise of their position, so that verification chooses among the same.
        """
        found = []
        for (request, history), row in zip(rows, _all_logits(executor, hidden, end), strict=True):
            chosen, rest = list[Drafted](), row
            while len(chosen) < min(n, len(row)) and all_finite(row):
                token_id = self.choose(request, history, rest)
                chosen.append(Drafted(token_id, confidence_of(row, token_id, None)))
                rest = rest.index_fill(0, torch.tensor([token_id]), ABSENT)
            found.append(chosen)
        return found

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


def _all_logits(executor: DraftsFromStates, hidden: Tensor, end: DraftEnd) -> Tensor:
    """Return the logits (m, vocab) after states (m, hidden), ABSENT for tokens that the end lacks."""
    logits = executor.draft_logits(hidden, end)
    if end.vocabulary is None:
        return logits
    whole = torch.full((len(logits), executor.spec.vocab_size), ABSENT)
    return whole.index_copy_(1, end.vocabulary.token_ids, logits)
