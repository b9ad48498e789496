"""The likeliest candidates of a token at one exit layer, and features of their logits.

From these features a predictor judges whether the likeliest candidate is the full model's token. They are the twelve
features of SpecEE (arXiv 2504.08850, section 4) for k = 4 candidates: the candidates' logits from the normed hidden
state (mapped if there is an exit map), the softmax over those four logits, and the change of that softmax since the
last exit layer that judged the token. The GPU kernel `draft` computes the same features with equal numbers.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.planning.times.costs import N_CANDIDATES as N_CANDIDATES

N_FEATURES = 3 * N_CANDIDATES

Floats = NDArray[np.float32]


class Candidates(NamedTuple):
    """The likeliest tokens of m rows. The tokens of a row with a NaN or infinite logit are meaningless."""

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
    """Return features (m, 3k) from the candidates' logits (m, k): the logits, their softmax, and the softmax's change.

    A token with a NaN or infinite logit has features and a softmax that are not finite; callers check is_finite.

    Args:
        previous: (m, k), the softmax at the last exit layer that judged the token, 0 at first. Updated in place.
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
    """Return a mask (m,) of the tokens that a predictor can judge. The other tokens pass every layer."""
    return np.asarray(np.isfinite(features).all(1))
