"""Draft sources for tests: guesses of every quality, and a check of what they are told."""

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from hetero_ee.speculation.exits.candidates import ChainJudge, Choose

Propose = Callable[[Sequence[int], int], list[int]]  # every token so far, tokens wanted -> a chain


class ScriptedSource:
    """Proposes what `propose` says, and keeps what it is told: `observed` by sequence, `closed` sequences.

    As a draft head does, it computes its drafts' rows behind what it has observed: they are there until truncated.
    """

    def __init__(self, propose: Propose, hidden_size: int) -> None:
        self._propose, self._hidden_size = propose, hidden_size
        self.observed: dict[int, list[int]] = {}
        self.closed: list[int] = []

    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        assert n_tokens > 0 and list(token_ids[:-1]) == self.observed[sequence]  # all but the last has been a row
        chain = self._propose(token_ids, n_tokens)
        self.observed[sequence] += [token_ids[-1], *chain]
        return chain

    def candidates(self, sequence: int, token_ids: Sequence[int], k: int) -> list[int]:
        return []

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        held = self.observed.setdefault(sequence, [])
        assert first_position == len(held) and normed.shape == (len(token_ids), self._hidden_size)
        held.extend(token_ids)

    def truncate(self, sequence: int, length: int) -> None:
        del self.observed.setdefault(sequence, [])[length:]

    def close(self, sequence: int) -> None:
        self.observed.pop(sequence, None)
        self.closed.append(sequence)


def repetition(token_ids: Sequence[int], n_tokens: int) -> list[int]:
    """What followed the last pair of tokens where it stood before, else nothing: a small n-gram lookup."""
    for start in range(len(token_ids) - 3, -1, -1):
        if tuple(token_ids[start : start + 2]) == tuple(token_ids[-2:]):
            return list(token_ids[start + 2 : start + 2 + n_tokens])
    return []


def garbage(seed: int, vocab_size: int) -> Propose:
    """Chains of random tokens, some too long, some empty."""
    draw = random.Random(seed)
    return lambda _, n_tokens: [draw.randrange(vocab_size) for _ in range(draw.randrange(n_tokens + 3))]


def oracle(texts: Sequence[Sequence[int]], seed: int = 0, error_rate: float = 0.0) -> Propose:
    """What the texts go on with, each token wrong with a chance of error_rate."""
    draw = random.Random(seed)

    def propose(token_ids: Sequence[int], n_tokens: int) -> list[int]:
        known = tuple(token_ids)
        followers = [list(text[len(known) :]) for text in texts if tuple(text[: len(known)]) == known]
        chain = followers[0][:n_tokens] if followers else []
        return [token ^ 1 if draw.random() < error_rate else token for token in chain]

    return propose


def in_turns(*proposals: Propose) -> Propose:
    """One after the other."""
    n_asked = 0

    def propose(token_ids: Sequence[int], n_tokens: int) -> list[int]:
        nonlocal n_asked
        n_asked += 1
        return proposals[n_asked % len(proposals)](token_ids, n_tokens)

    return propose
