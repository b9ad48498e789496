"""How one text differs from full mode's, and how likely a mode finds a text: sums, of which estimates are made."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_ee.errors import ModelError

WORD_OR_MARK = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}]\w+)*|[^\w\s]")


def n_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Positions at which two texts have the same token."""
    return sum(one == other for one, other in zip(ours, theirs, strict=False))


def first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Tokens before the first that differs, or that one text lacks; None where there is none."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def doubled_words(text: str) -> tuple[int, int]:
    """Words equal to the one right before them, with no mark between, whatever their case; and words in all."""
    found = WORD_OR_MARK.findall(text.casefold())
    is_word = [each[0].isalnum() or each[0] == "_" for each in found]
    n_doubled = sum(word and one == other for word, one, other in zip(is_word, found, found[1:], strict=False))
    return n_doubled, sum(is_word)


def nats_and_divergence(logits: Tensor, reference: Tensor, token_id: int) -> tuple[float, float]:
    """Of logits (vocab,) for one position: -log p(token that stands there), and KL(reference || them), in nats.

    Raises ModelError where they are no numbers.
    """
    if torch.isnan(logits).any():
        raise ModelError("the model computes NaN logits; its weights are damaged or beyond the range of its numbers.")
    ours, theirs = (torch.log_softmax(each.double(), -1) for each in (logits, reference))
    chances = theirs.exp()
    kl = torch.where(chances > 0, chances * (theirs - ours), 0.0).sum()  # 0 log 0 is 0
    return -float(ours[token_id]), max(0.0, float(kl))
