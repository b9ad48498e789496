"""The exact distribution that sampling draws from."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_ee.decoding.sampling import SamplingParams, filtered_scores


def filtered_probabilities(logits: Tensor, history: Sequence[int], params: SamplingParams) -> Tensor:
    """What choose_token draws from at temperature > 0, float64 (vocab,)."""
    return torch.softmax(filtered_scores(logits, history, params), 0)
