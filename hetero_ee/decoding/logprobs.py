"""Log-probabilities of tokens in the model's own distribution, before temperature, penalties and filters."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hetero_ee.decoding.sampling import best_first

NO_LOGPROBS = (
    "the full model's probabilities are not computed for tokens that exit; leave it out, or use mode full or exact"
)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the chosen token and of the likeliest tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # token ids and theirs, the likeliest first, of equals the lowest id


def token_logprobs(logits: Tensor, token_id: int, n_top: int) -> TokenLogprobs:
    """Return the float64 log-probabilities of this token and of the n_top likeliest, from logits (vocab,)."""
    values = logits.numpy(force=True).astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    best = best_first(values, n_top) if n_top > 0 else ()
    return TokenLogprobs(float(values[token_id]), tuple((int(each), float(values[each])) for each in best))
