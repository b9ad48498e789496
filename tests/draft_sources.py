"""Draft sources for tests: drafts of every quality, and a check of what the sources are told."""

import itertools
import math
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from hetero_ee.runtime.choice import confidence_of
from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftEnd
from hetero_ee.speculation.drafts import ABSENT
from hetero_ee.speculation.sources.source import Choose, ChooseSeveral, Draft, DraftSource, Levels

MAX_DRAFTS = 16
Chooses = Callable[[Tensor, Sequence[int]], int | None]
Propose = Callable[[Sequence[int]], Sequence[int]]  # every token so far -> what may follow


def sampling(source: Any, chooses: Chooses) -> Choose:
    """As the source's model is sampled by this choice from whole logits; None: none of them."""

    def choose(hidden: Tensor, end: DraftEnd, history: Sequence[int]) -> Drafted:
        logits = source._target.draft_logits(hidden, end)[0].as_subclass(Tensor)
        if end.vocabulary is not None:
            whole = torch.full((source._target.spec.vocab_size,), ABSENT)
            logits = whole.index_copy_(0, end.vocabulary.token_ids, logits)
        token_id = chooses(logits, history) if torch.isfinite(logits).all() else None
        return (
            Drafted(NO_TOKEN, math.nan)
            if token_id is None
            else Drafted(token_id, confidence_of(logits, token_id, None))
        )

    return choose


def greedy(logits: Tensor, history: Sequence[int]) -> int:
    return int(logits.argmax())


def taken(
    source: DraftSource, token_ids: Sequence[int], n: int, choose: Chooses = greedy, sequence: int = 0
) -> list[Draft]:
    """Up to n of the source's drafts."""
    with closing(source.drafts(sequence, token_ids, sampling(source, choose))) as drafts:
        return list(itertools.islice(drafts, n))


def taken_ids(
    source: DraftSource, token_ids: Sequence[int], n: int, choose: Chooses = greedy, sequence: int = 0
) -> list[int]:
    """Their tokens."""
    return [draft.token_id for draft in taken(source, token_ids, n, choose, sequence)]


class ScriptedSource:
    """Drafts what `propose` says, and keeps what it is told: `observed` by sequence, `read` prompts, those `closed`.

    As a draft head does, it computes its drafts after what it has observed: they are there until the generator closes.
    """

    name = "scripted"

    def __init__(
        self,
        propose: Propose,
        hidden_size: int,
        confidence: Callable[[], float] = lambda: 1.0,
        *,
        is_free: bool = False,
        draft_s: float = 0.0,
    ) -> None:
        self._propose, self._hidden_size, self._confidence = propose, hidden_size, confidence
        self.is_free, self.draft_s = is_free, draft_s
        self.observed: dict[int, list[int]] = {}
        self.read: list[list[int]] = []
        self.closed: list[int] = []
        self.n_drafts = 0

    def drafts(self, sequence: int, token_ids: Sequence[int], choose: Choose) -> Generator[Draft]:
        held = self.observed[sequence]
        n_observed = len(held)
        assert list(token_ids[:n_observed]) == held and len(token_ids) > n_observed
        try:
            held += token_ids[n_observed:]
            for token_id in self._drafted(token_ids, choose):
                held.append(token_id)
                self.n_drafts += 1
                yield Draft(token_id, self._confidence())
        finally:
            del held[n_observed:]

    def observe(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        held = self.observed.setdefault(sequence, [])
        assert first_position == len(held) and normed.shape == (len(token_ids), self._hidden_size)
        held.extend(token_ids)

    def read_prompt(
        self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor, *captured: Tensor
    ) -> None:
        ScriptedSource.observe(self, sequence, first_position, token_ids, normed)  # not a seam of its own
        self.read.append(list(token_ids))

    def truncate(self, sequence: int, length: int) -> None:
        del self.observed.setdefault(sequence, [])[length:]

    def close(self, sequence: int) -> None:
        self.observed.pop(sequence, None)
        self.closed.append(sequence)

    def _drafted(self, token_ids: Sequence[int], choose: Choose) -> Sequence[int] | Generator[int]:
        return self._propose(token_ids)


class ScriptedTree(ScriptedSource):
    """Drafts several tokens after each, those that `several` says of all tokens up to it."""

    name = "scripted tree"

    def __init__(self, several: Callable[[Sequence[int]], Sequence[int]], hidden_size: int, seed: int = 0) -> None:
        self._several, self._draw = several, random.Random(seed)
        super().__init__(lambda token_ids: several(token_ids)[:1], hidden_size, self._draw.random)

    def levels(self, sequence: int, token_ids: Sequence[int], choose: ChooseSeveral) -> Levels:
        assert list(token_ids[:-1]) == self.observed[sequence]
        nodes = [list(token_ids)]
        while True:
            rows = [list(self._several(node)) for node in nodes]
            drafts = [[Draft(token, self._draw.random()) for token in row] for row in rows]
            self.n_drafts += sum(map(len, rows))
            chosen = yield drafts
            nodes = [[*nodes[node], rows[node][place]] for node, place in chosen]


def repetition(token_ids: Sequence[int]) -> list[int]:
    """What followed the last pair of tokens where it stood before, else nothing: a small n-gram lookup."""
    for start in range(len(token_ids) - 3, -1, -1):
        if tuple(token_ids[start : start + 2]) == tuple(token_ids[-2:]):
            return list(token_ids[start + 2 :])
    return []


def garbage(seed: int, vocab_size: int) -> Propose:
    """Random tokens, often none."""
    draw = random.Random(seed)
    return lambda _: [draw.randrange(vocab_size) for _ in range(draw.randrange(MAX_DRAFTS))]


def oracle(texts: Sequence[Sequence[int]], seed: int = 0, error_rate: float = 0.0) -> Propose:
    """What the texts go on with, each token wrong with a chance of error_rate."""
    draw = random.Random(seed)

    def propose(token_ids: Sequence[int]) -> list[int]:
        known = tuple(token_ids)
        followers = [list(text[len(known) :]) for text in texts if tuple(text[: len(known)]) == known]
        drafts = followers[0][:MAX_DRAFTS] if followers else []
        return [token ^ 1 if draw.random() < error_rate else token for token in drafts]

    return propose


def alternately(*proposals: Propose) -> Propose:
    """One after the other."""
    n_asked = 0

    def propose(token_ids: Sequence[int]) -> Sequence[int]:
        nonlocal n_asked
        n_asked += 1
        return proposals[n_asked % len(proposals)](token_ids)

    return propose


def following(drafts: Callable[[int, int], int]) -> Propose:
    """One token after another. drafts: a token and its position -> the token that follows."""

    def propose(token_ids: Sequence[int]) -> list[int]:
        text = list(token_ids)
        while len(text) < len(token_ids) + MAX_DRAFTS:
            text.append(drafts(text[-1], len(text) - 1))
        return text[len(token_ids) :]

    return propose
