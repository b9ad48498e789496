"""The few likeliest next tokens, by the lm_head at an exit layer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.planning.times.costs import N_CANDIDATES as N_CANDIDATES


@dataclass(frozen=True, slots=True)
class Candidates:
    """token_ids (m, k) int64, best first; logits (m, k) fp32; is_finite (m,): False if logits are NaN or infinite, in
    which case the row's tokens are meaningless."""

    token_ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    is_finite: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HeadCandidates:
    """Chooses the likeliest tokens by the head's logits at one layer."""

    n_candidates: int = N_CANDIDATES

    def of(self, logits: Tensor) -> Candidates:
        """Return the n_candidates largest logits of each row of (m, vocab) fp32, the lowest id first among equals."""
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
