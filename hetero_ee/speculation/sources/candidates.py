"""Candidates: the few tokens that may follow, from the head at an exit layer and from sources that draft ahead."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

N_CANDIDATES = 4
ABSENT = -1e30  # logit of a token that is none of the candidates: finite, for what tempers, penalizes and adds it up

Choose = Callable[[Tensor, Sequence[int]], int]
"""(logits (vocab,), every token before) -> the token that this sequence's sampling takes there."""


class ChainJudge(Protocol):
    """Says, as one text's chain is made, how far it is worth its time. It hears of computed drafts by `choose`."""

    def goes_on(self) -> bool:
        """Whether another draft is worth computing behind those that there are."""

    def leading(self, chances: Sequence[float], n_tokens: int) -> int:
        """How many drafts that cost nothing begin the chain instead of up to n_tokens computed ones; 0 for none.

        chances: that each is right where all before it are.
        """

    def following(self, chances: Sequence[float]) -> int:
        """How many of those are worth their rows behind the computed drafts; chances as above."""


class DraftSource(Protocol):
    """Proposes tokens from what is known without the later layers.

    token_ids is the sequence's text from position 0 on: what was observed, and drafts not yet verified behind it.
    """

    def propose(
        self, sequence: int, token_ids: Sequence[int], n_tokens: int, choose: Choose, judge: ChainJudge | None = None
    ) -> list[int]:
        """A chain of 0 to n_tokens tokens that may follow token_ids. judge: asked before each draft that takes time;
        None for as many as can be had."""

    def candidates(self, sequence: int, token_ids: Sequence[int], k: int) -> list[int]:
        """0 to k different tokens that may come next, best first."""

    def observe(self, sequence: int, first_position: int, token_ids: Sequence[int], normed: Tensor) -> None:
        """Verified rows: their tokens from first_position on, and their final normed hidden states (m, hidden)."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets every position from `length` on."""

    def close(self, sequence: int) -> None:
        """The sequence has ended; closing an unknown one does nothing."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """token_ids (m, k) int64, best first; logits (m, k) fp32, theirs; is_finite (m,): False where logits are NaN or
    infinite, and the row's tokens mean nothing."""

    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    is_finite: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HeadCandidates:
    """The likeliest tokens by the head's logits at one layer."""

    n_candidates: int = N_CANDIDATES

    def of(self, logits: Tensor) -> Candidates:
        """logits (m, vocab) fp32 -> the n_candidates largest of each row, the lowest id first among equals."""
        rest = logits.numpy(force=True).copy()
        m, k = len(rest), min(self.n_candidates, rest.shape[1])
        token_ids, values = np.empty((m, k), np.int64), np.empty((m, k), np.float32)
        flat, first = rest.reshape(-1), np.arange(m) * rest.shape[1]
        # As many passes as candidates: argmax takes the lowest of equal ids, where topk takes any, and NaN for largest.
        for place in range(k):
            token_ids[:, place] = best = rest.argmax(1)
            values[:, place] = flat[first + best]
            flat[first + best] = -np.inf
        return Candidates(token_ids, values, np.asarray(np.isfinite(values).all(1)))


def spread_out(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits (k,) of the tokens (k,) among all: (vocab,), every other one out of reach."""
    return torch.full((vocab_size,), ABSENT).index_copy_(0, token_ids, logits)


def merged_candidates(proposals: Iterable[Sequence[int]], k: int) -> list[int]:
    """The first k different tokens of the proposals, one after the other: those of the best source come first."""
    merged = dict.fromkeys(token_id for proposal in proposals for token_id in proposal)
    return list(merged)[:k]
