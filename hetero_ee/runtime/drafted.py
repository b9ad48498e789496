"""Descriptions of how a head drafts tokens, and its results: a token and its confidence instead of all logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hetero_ee.weights.weight import Weight

NO_TOKEN = -1  # of a row whose logits are not finite
LEAST_TEMPERATURE = 1e-5  # below it fp32 can't represent the noise added to the logits


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """Parameters of the noise with which a token is sampled, the same in drafting and in verification.

    Filters (top-k, top-p, min-p) are not applied to drafts. At most a share of 1 - top_p of the drafts differs for that
    reason.
    """

    temperature: float  # 0 is greedy
    seed: int  # 0 to 2^64 - 1
    sequence: int
    position: int


class Drafted(NamedTuple):
    token_id: int  # NO_TOKEN where the logits are not finite
    confidence: float  # NaN where it can't be judged


class Judge(Protocol):
    """Estimates from the largest logits how likely the best token is right."""

    @property
    def network(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The judge's network for GPUs: fp32 (h, 3k), (h,), (h,), (1,), with ReLU and sigmoid.

        Its inputs are the k largest logits, their softmax and the change of that softmax.
        """
        ...

    def of_row(self, logits: Tensor) -> float:
        """Return the estimate on the CPU from logits (vocab,): 0 to 1, or NaN if they are not finite."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StateMap:
    """An exit map of normed states, x + x W^T + bias, where W is `up down`, or `up` if `down` is None."""

    up: Weight  # (hidden, rank)
    down: Weight | None  # (rank, hidden)
    bias: Tensor  # fp32 (hidden,)


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """A subset of a head's rows, to which drafts are limited."""

    rows: Weight  # (k, hidden)
    token_ids: Tensor  # int64 (k,), ascending


@dataclass(frozen=True, slots=True, eq=False)
class DraftEnd:
    """The steps from hidden states to drafts: final norm, map, head and judge.

    Reuse one object: executors cache prepared weights by its identity.
    """

    is_normed: bool = False  # the states have passed the final norm, or need none
    state_map: StateMap | None = None
    judge: Judge | None = None  # None: the chosen token's probability is the confidence
    vocabulary: DraftVocabulary | None = None  # None: the model's


def noise_words(noise: Sequence[DraftNoise]) -> Tensor:
    """Pack noise parameters into int32 (m, 5) for the GPU's kernels.

    A row has the seed (low word first), the sequence, the position, and the bits of fp32 1 / temperature; 0 if the
    temperature is below LEAST_TEMPERATURE.
    """
    words = np.empty((len(noise), 5), np.int32)
    for row, one in zip(words, noise, strict=True):
        inverse = 0.0 if one.temperature < LEAST_TEMPERATURE else 1 / one.temperature
        row[:2] = np.array([one.seed], np.uint64).view(np.int32)
        row[2:4] = one.sequence, one.position
        row[4:] = np.array([inverse], np.float32).view(np.int32)
    return torch.from_numpy(words)


def drafted_of(rows: Tensor) -> list[Drafted]:
    """Unpack drafts from int32 (m, 2) on the CPU: ids, and the bits of fp32 confidences."""
    confidences = rows[:, 1].contiguous().view(torch.float32)
    return [Drafted(int(i), float(c)) for i, c in zip(rows[:, 0].tolist(), confidences.tolist(), strict=True)]


def drafted_rows(drafted: Sequence[Drafted]) -> Tensor:
    """Pack drafts into int32 (m, 2), the inverse of drafted_of."""
    rows = torch.empty(len(drafted), 2, dtype=torch.int32)
    for row, one in zip(rows, drafted, strict=True):
        row[0] = one.token_id
        row[1:] = torch.tensor([one.confidence]).view(torch.int32)
    return rows
