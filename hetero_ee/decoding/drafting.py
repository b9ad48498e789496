"""Drafting: what exact mode drafts with, and how far it goes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_ee.decoding.draft_gate import Gate
from hetero_ee.decoding.draft_pace import Pace
from hetero_ee.errors import UsageError
from hetero_ee.exits.candidates import DraftSource
from hetero_ee.planning.limits import MAX_DRAFT_TOKENS

# Normed hidden state (hidden,), logits (vocab,) and draft of one row -> the chance that the draft is right.
Confidence = Callable[[Tensor, Tensor, int], float]


@dataclass(frozen=True, slots=True)
class ExitHead:
    """Makes drafts of hidden states at the boundary: final norm, map, the model's head.

    map: normed states (m, hidden) to estimates of the final normed ones; None takes them as they are. confidence: None
    for the draft's own probability, at an exit the largest one.
    """

    map: Callable[[Tensor], Tensor] | None = None
    confidence: Confidence | None = None

    def confidence_of(self, normed: Tensor, logits: Tensor, token_id: int, is_exit: bool) -> float:
        """Of the token that may follow one row; is_exit: it was chosen by these logits and not by a source."""
        if self.confidence is not None:
            return self.confidence(normed, logits, token_id)
        probabilities = torch.softmax(logits, 0)
        return float(probabilities.max() if is_exit else probabilities[token_id])


@dataclass(frozen=True, slots=True)
class Drafting:
    """boundary: layers that a row passes before it waits, 0 to all but one. draft_tokens: rows of one text in one pass
    of verification, 1 to 16.

    gate: decides row by row whether to go on drafting. exit_head: None for no drafts by exit; at boundary 0 there are
    none either. source: proposes chains, which the exit head and the gate may shorten at the boundary; where a chain
    ends, exits go on. notice: told, once in a text, that something could not draft. pace: says, round by round, whether
    drafting is faster than not; None drafts always. Raises UsageError.
    """

    boundary: int
    draft_tokens: int
    gate: Gate
    exit_head: ExitHead | None = None
    source: DraftSource | None = None
    notice: Callable[[str], None] | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        if self.boundary < 0:
            raise UsageError(f"boundary is {self.boundary}; expected a layer, counted from 0.")
        if not 1 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise UsageError(f"draft_tokens is {self.draft_tokens}; expected 1 to {MAX_DRAFT_TOKENS}.")

    def check_boundary(self, n_layers: int) -> None:
        """Raises UsageError where no layer is left behind the boundary."""
        if self.boundary >= n_layers:
            raise UsageError(f"boundary is {self.boundary}; expected 0 to {n_layers - 1} for {n_layers} layers.")
