"""Features of a row at one layer: what tells whether its likeliest candidate is the full model's token.

The twelve of SpecEE (arXiv 2504.08850, section 4), for k = 4 candidates: their logits on the sliced head of the normed
(and mapped, where there is a map) hidden state, the softmax over those four, and the change of that softmax since the
layer evaluated last. `previous` holds that layer's softmax, zeros where there was none before: the definition, and the
numbers, of the operation exit_predictor.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_ee.speculation.exits.candidates import N_CANDIDATES

Floats = NDArray[np.float32]

RICH_NAMES = (
    "top_probability",  # of the likeliest candidate, among the candidates
    "probability_gap",  # to the second
    "logit_gap",
    "entropy",  # over the candidates, nats
    "top_change",  # of the likeliest candidate's probability
    "rank",  # the likeliest candidate's place among the candidates as they were proposed: 0 for the best
    "agreement",  # with a source that needs no layer, see source_agreement
    "mass",  # the candidates' share of the whole vocabulary's probability, where the whole head has run
)


def feature_names(n_candidates: int = N_CANDIDATES, is_rich: bool = False) -> tuple[str, ...]:
    """Names of the columns of exit_features, or of rich_features."""
    kinds = ("logit", "probability", "change")
    names = tuple(f"{kind}_{candidate}" for kind in kinds for candidate in range(n_candidates))
    return names + RICH_NAMES if is_rich else names


def exit_features(logits: Floats, previous: Floats, out: Floats | None = None) -> Floats:
    """logits, previous: (m, k) of the candidates -> (m, 3k): logits, softmax, change; written to out where given.

    `previous` becomes the softmax. Batch with a logit that is NaN or infinite have features that are not finite, and
    leave previous so: to see them is the caller's part (is_finite).
    """
    m, k = logits.shape
    features = np.empty((m, 3 * k), np.float32) if out is None else out
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
    """(m,): which rows a predictor can judge; the others go on at full depth."""
    return np.asarray(np.isfinite(features).all(1))


def rich_features(features: Floats, agreement: Floats | None = None, mass: Floats | None = None) -> Floats:
    """exit_features (m, 3k) -> (m, 3k + len(RICH_NAMES)), for the logistic regression.

    agreement (m,): see source_agreement, zeros where None. mass (m,): see candidate_mass, ones where None.
    """
    m, width = features.shape
    k = width // 3
    logits, softmax, change = features[:, :k], features[:, k : 2 * k], features[:, 2 * k :]
    rich = np.empty((m, width + len(RICH_NAMES)), np.float32)
    rich[:, :width] = features
    extra = rich[:, width:]
    best = logits.argmax(1)
    top_probability = np.maximum.reduce(softmax, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        top_logit, gap = _top_and_gap(logits)
        extra[:, 0] = top_probability
        # The second's probability is the first's times exp(-gap), and log p = logit - top logit + log top probability.
        extra[:, 1] = top_probability - top_probability * np.exp(-gap) if k > 1 else top_probability
        extra[:, 2] = gap
        extra[:, 3] = top_logit - np.log(top_probability) - np.add.reduce(softmax * logits, axis=1)
    extra[:, 4] = change[np.arange(m), best]
    extra[:, 5] = best
    extra[:, 6] = 0.0 if agreement is None else agreement
    extra[:, 7] = 1.0 if mass is None else mass
    return rich


def source_agreement(token_id: int, proposed: Sequence[int]) -> float:
    """How far a source such as n-grams agrees with the likeliest candidate: 1 where that is the best it proposed, 1/2
    where another, 0 where none."""
    if token_id not in proposed:
        return 0.0
    return 1.0 if proposed[0] == token_id else 0.5


def candidate_mass(candidate_logits: Floats, logits: Floats) -> Floats:
    """(m, k) logits of the candidates, (m, vocab) of all tokens -> (m,) the candidates' share of the probability."""
    top = logits.max(1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        share = np.exp(candidate_logits - top).sum(1) / np.exp(logits - top).sum(1)
    return np.asarray(share, np.float32)


def _top_and_gap(logits: Floats) -> tuple[Floats, Floats]:
    """(m, k) -> (m,) the largest, and its distance to the second; to 0 where there is no other."""
    if logits.shape[1] == 1:
        return logits[:, 0], logits[:, 0]
    ordered = logits.copy()
    ordered.partition(-2, axis=1)
    return ordered[:, -1], ordered[:, -1] - ordered[:, -2]
