"""Differences between a text and full mode's, and how well a mode predicts a text."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_ee.errors import ModelError

WORD_OR_MARK = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}]\w+)*|[^\w\s]")


def n_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return at how many positions two texts have the same token."""
    return sum(one == other for one, other in zip(ours, theirs, strict=False))


def first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the number of tokens before the first difference, or None if the texts are equal."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def doubled_words(text: str) -> tuple[int, int]:
    """Return how many words equal the one directly before them, ignoring case, and the number of words."""
    found = WORD_OR_MARK.findall(text.casefold())
    is_word = [each[0].isalnum() or each[0] == "_" for each in found]
    n_doubled = sum(word and one == other for word, one, other in zip(is_word, found, found[1:], strict=False))
    return n_doubled, sum(is_word)


def nats_and_divergence(logits: Tensor, reference: Tensor, token_id: int) -> tuple[float, float]:
    """Return -log p(token_id) and KL(reference || logits) in nats, for logits (vocab,) of one position.

    Raises:
        ModelError: if the logits are NaN.
    """
    if torch.isnan(logits).any():
        raise ModelError("the model computes NaN logits; its weights are damaged or beyond the range of its numbers.")
    ours, theirs = (torch.log_softmax(each.double(), -1) for each in (logits, reference))
    chances = theirs.exp()
    kl = torch.where(chances > 0, chances * (theirs - ours), 0.0).sum()  # 0 log 0 is 0
    return -float(ours[token_id]), max(0.0, float(kl))
