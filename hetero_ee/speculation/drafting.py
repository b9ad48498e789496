"""Drafting: what exact mode drafts with, and how far it goes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.planning.limits import MAX_DRAFT_LENGTH
from hetero_ee.speculation.chain_rule import ChainRule
from hetero_ee.speculation.draft_gate import Gate
from hetero_ee.speculation.draft_pace import Pace
from hetero_ee.speculation.sources.candidates import DraftSource

# Normed hidden state (hidden,), logits (vocab,) and draft of one row -> the chance that the draft is right.
Confidence = Callable[[Tensor, Tensor, int], float]
# Logits (k,) of the candidates that one row has had since it was first judged, and their softmax (k,) where it was
# judged last -> the chance that the likeliest is right. The softmax is brought up to date.
SlicedConfidence = Callable[[NDArray[np.float32], NDArray[np.float32]], float]


@dataclass(frozen=True, slots=True)
class ExitHead:
    """Makes drafts of hidden states at the exit_layer: final norm, map, the model's head.

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
class ExitLevel:
    """An exit layer in front of the plan's, where a row exits from a confidence of `threshold`.

    head: of rows that are judged here first. sliced: of rows that have candidates from a level before; None lets them
    pass unseen.
    """

    head: ExitHead
    threshold: float
    sliced: SlicedConfidence | None = None
    sliced_threshold: float = 1.0


@dataclass(frozen=True, slots=True)
class ExitLevels:
    """by_exit_layer: those that there are. scheduled: the ones that every row is judged at, beside those where the last
    rows of its text have exited."""

    by_exit_layer: Mapping[int, ExitLevel] = field(default_factory=dict)
    scheduled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafting:
    """exit_layer: layers that a row passes before it waits, 0 to all but one. draft_length: rows of one text in one
    pass of verification, 1 to 16.

    gate: decides row by row whether to go on drafting. exit_head: None for no drafts by exit; at exit layer 0 there are
    none either. source: proposes chains, which the exit head and the gate may shorten at the exit layer; where a chain
    ends, exits go on. warn: told, once in a text, that something could not draft. pace: says, round by round, whether
    drafting is faster than not; None drafts always. drafts_ahead: what the last row would draft begins on the GPU while
    the CPU verifies, and passes at most layers_ahead layers there, None for all there are. levels: where rows may exit
    before the exit layer; None for nowhere. chain_rule: how far the source drafts; None as far as there is room. Raises
    UsageError.
    """

    exit_layer: int
    draft_length: int
    gate: Gate
    exit_head: ExitHead | None = None
    source: DraftSource | None = None
    warn: Callable[[str], None] | None = None
    pace: Pace | None = None
    drafts_ahead: bool = False
    layers_ahead: int | None = None
    levels: ExitLevels | None = None
    chain_rule: ChainRule | None = None

    def __post_init__(self) -> None:
        if self.exit_layer < 0:
            raise UsageError(f"exit layer is {self.exit_layer}; expected a layer, counted from 0.")
        if not 1 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise UsageError(f"draft_length is {self.draft_length}; expected 1 to {MAX_DRAFT_LENGTH}.")
        for level in () if self.levels is None else (*self.levels.by_exit_layer, *self.levels.scheduled):
            if not 0 < level < self.exit_layer:
                raise UsageError(
                    f"an exit level is {level}; expected 1 to {self.exit_layer - 1}, before the exit layer."
                )

    def check_exit_layer(self, n_layers: int) -> None:
        """Raises UsageError where no layer is left behind the exit layer."""
        if self.exit_layer >= n_layers:
            raise UsageError(f"exit layer is {self.exit_layer}; expected 0 to {n_layers - 1} for {n_layers} layers.")
