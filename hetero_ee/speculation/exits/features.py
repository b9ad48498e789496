"""The likeliest candidates of a token at one exit layer, and features of their logits.

A predictor judges from the features whether the likeliest candidate is the full model's token. They are the twelve of
SpecEE (arXiv 2504.08850, section 4) for k = 4 candidates: their logits from the normed hidden state (mapped if there is
a map), the softmax over those four, and the change of that softmax since the exit layer evaluated last. Definition and
numbers equal those of the GPU's kernel `draft`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.planning.times.costs import N_CANDIDATES as N_CANDIDATES

N_FEATURES = 3 * N_CANDIDATES

Floats = NDArray[np.float32]


class Candidates(NamedTuple):
    """The likeliest tokens of m rows. A row with a NaN or infinite logit is not finite, and its tokens mean nothing."""

    token_ids: NDArray[np.int64]  # (m, k), best first
    logits: Floats  # (m, k)
    is_finite: NDArray[np.bool_]  # (m,)


def likeliest(logits: Tensor, n_candidates: int = N_CANDIDATES) -> Candidates:
    """Return the n_candidates largest logits of each row of (m, vocab) fp32, the lowest id first among equals."""
    rest = logits.numpy(force=True).copy()
    m, k = len(rest), min(n_candidates, rest.shape[1])
    token_ids, values = np.empty((m, k), np.int64), np.empty((m, k), np.float32)
    flat, first = rest.reshape(-1), np.arange(m) * rest.shape[1]
    # As many passes as candidates: argmax takes the lowest of equal ids, where topk takes any, and NaN for largest.
    for place in range(k):
        token_ids[:, place] = best = rest.argmax(1)
        values[:, place] = flat[first + best]
        flat[first + best] = -np.inf
    return Candidates(token_ids, values, is_finite(values))


def exit_features(logits: Floats, previous: Floats) -> Floats:
    """Return (m, 3k) logits, softmax and change from the candidates' logits (m, k).

    previous: (m, k), the softmax at the exit layer evaluated last, zeros at first; updated in place. A token with a NaN
    or infinite logit has features that are not finite and leaves `previous` so: the caller checks is_finite.
    """
    m, k = logits.shape
    features = np.empty((m, 3 * k), np.float32)
    softmax = features[:, k : 2 * k]
    features[:, :k] = logits
    with np.errstate(invalid="ignore", over="ignore"):
        np.subtract(logits, np.maximum.reduce(logits, axis=1, keepdims=True), out=softmax)
    np.exp(softmax, out=softmax)
    softmax /= np.add.reduce(softmax, axis=1, keepdims=True)
    np.subtract(softmax, previous, out=features[:, 2 * k :])
    previous[:] = softmax
    return features


def is_finite(features: Floats) -> NDArray[np.bool_]:
    """Return (m,) which tokens a predictor can judge; the others pass every layer."""
    return np.asarray(np.isfinite(features).all(1))
