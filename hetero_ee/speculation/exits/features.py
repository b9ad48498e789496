"""Features of a token at one exit layer, from which a predictor judges whether its likeliest candidate is the full
model's
token.

The twelve of SpecEE (arXiv 2504.08850, section 4) for k = 4 candidates: their logits from the normed hidden state
(mapped if
there is a map), the softmax over those four, and the change of that softmax since the exit layer evaluated last.
Definition
and numbers equal those of the GPU's kernel `draft`.
"""

import numpy as np
from numpy.typing import NDArray

from hetero_ee.speculation.exits.candidates import N_CANDIDATES

N_FEATURES = 3 * N_CANDIDATES

Floats = NDArray[np.float32]


def exit_features(logits: Floats, previous: Floats) -> Floats:
    """Return (m, 3k) logits, softmax and change from the candidates' logits (m, k).

    previous: (m, k), the softmax at the exit layer evaluated last, zeros at first; updated in place. A token with a NaN
    or
    infinite logit has features that are not finite and leaves `previous` so: the caller checks is_finite.
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
