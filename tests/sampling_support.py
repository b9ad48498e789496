"""The exact distribution that sampling draws from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_ee.decoding.sampling import filtered_scores
from hetero_ee.options.sampling import SamplingParams


def filtered_probabilities(logits: Tensor, history: Sequence[int], params: SamplingParams) -> Tensor:
    """What choose_token draws from at temperature > 0, float64 (vocab,)."""
    return torch.softmax(filtered_scores(logits, history, params), 0)
