"""Metrics for comparing a mode's text and predictions with full mode's, and confidence intervals of the metrics."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.errors import ModelError

WORD_OR_MARK = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}]\w+)*|[^\w\s]")
N_RESAMPLES = 2000
TAIL = 0.025  # on either side of the interval

Array = NDArray[np.float64]


def n_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of positions at which two texts have the same token."""
    return sum(one == other for one, other in zip(ours, theirs, strict=False))


def first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the number of tokens before the first difference, or None if the texts are equal."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def doubled_words(text: str) -> tuple[int, int]:
    """Return the number of words equal to the one directly before, ignoring case, and the number of all words."""
    found = WORD_OR_MARK.findall(text.casefold())
    is_word = [each[0].isalnum() or each[0] == "_" for each in found]
    n_doubled = sum(word and one == other for word, one, other in zip(is_word, found, found[1:], strict=False))
    return n_doubled, sum(is_word)


def nats_and_divergence(logits: Tensor, reference: Tensor, token_id: int) -> tuple[float, float]:
    """Return -log p(token_id) and KL(reference || logits) in nats, for logits (vocab,) of one position.

    Raises: ModelError: if the logits are NaN.
    """
    if torch.isnan(logits).any():
        raise ModelError("the model computes NaN logits; its weights are damaged or beyond the range of its numbers.")
    ours, theirs = (torch.log_softmax(each.double(), -1) for each in (logits, reference))
    chances = theirs.exp()
    kl = torch.where(chances > 0, chances * (theirs - ours), 0.0).sum()  # 0 log 0 is 0
    return -float(ours[token_id]), max(0.0, float(kl))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the bounds of its 95 % interval, which are None for a single text."""

    value: float
    low: float | None = None
    high: float | None = None


def ratio(
    parts: Sequence[float], wholes: Sequence[float], seed: int, of: Callable[[Array], Array] = lambda ratios: ratios
) -> Estimate | None:
    """Return of(sum of parts / sum of wholes) with an interval, or None if the sum of the wholes is 0.

    There is one part and one whole per text. The interval is a percentile bootstrap over texts, not over tokens, which
    depend on each other (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). The same seed draws
    the same texts each time.
    """
    pairs = np.array([parts, wholes], dtype=np.float64)
    if not pairs[1].sum():
        return None
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        value = float(of(np.asarray(pairs[0].sum() / pairs[1].sum())))
        n_texts = len(parts)
        if n_texts < 2:
            return Estimate(value)
        drawn = np.random.default_rng(seed).integers(n_texts, size=(N_RESAMPLES, n_texts))
        sums = pairs[:, drawn].sum(axis=2)
        found = of(sums[0] / sums[1])[sums[1] > 0]
    low, high = np.quantile(found, (TAIL, 1 - TAIL), method="inverted_cdf")  # no interpolation: perplexity may be inf
    return Estimate(value, float(low), float(high))
