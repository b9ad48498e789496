"""Chooses drafts from logits on the CPU: the likeliest token after adding noise, and its confidence."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hetero_ee.runtime.drafted import NO_TOKEN, Drafted, DraftNoise, Judge

Noise = Callable[[int, int, int, int], Tensor]  # as gumbel_noise


def gumbel_noise(n_tokens: int, seed: int, sequence: int, position: int) -> Tensor:
    """Return standard Gumbel noise (n_tokens,), float64, that depends only on seed, sequence and position."""
    key, counter = (np.array(words, np.uint64) for words in ((seed, 0), (0, 0, sequence, position)))
    bits = np.random.Philox(key=key, counter=counter).random_raw(n_tokens)
    bits >>= 12
    # 52 bits and a half are exact in float64, so that neither 0 nor 1, whose noise is infinite, can come out.
    uniform = torch.from_numpy(bits.view(np.int64).astype(np.float64)).add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def all_finite(logits: Tensor) -> bool:
    """Return whether every logit is finite. Checking their sum first needs an eighth of the time."""
    return math.isfinite(logits.sum().item()) or bool(torch.isfinite(logits).all())


def tempered(scores: Tensor, temperature: float) -> Tensor:
    """Return scores / temperature, float64, shifted so that the greatest is 0 however low the temperature is."""
    values = scores.numpy(force=True)
    return torch.from_numpy(values.astype(np.float64)).sub_(float(values.max())).div_(temperature)


def confidence_of(logits: Tensor, place: int, judge: Judge | None) -> float:
    """Return the confidence in the token with logits[place]: the judge's estimate or, without one, its probability."""
    return float(torch.softmax(logits, 0)[place]) if judge is None else judge.of_row(logits)


def drafted(logits: Tensor, noise: DraftNoise, judge: Judge | None, token_ids: Tensor | None = None) -> Drafted:
    """Draft a token from logits (n,) on the CPU. token_ids: int64 (n,), the logits' tokens; None for 0 .. n - 1."""
    if not all_finite(logits):
        return Drafted(NO_TOKEN, math.nan)
    scores = logits
    if noise.temperature > 0:
        scores = tempered(logits, noise.temperature)
        n_tokens = len(logits) if token_ids is None else int(token_ids[-1]) + 1
        drawn = gumbel_noise(n_tokens, noise.seed, noise.sequence, noise.position)
        scores += drawn if token_ids is None else drawn[token_ids]
    place = int(scores.numpy(force=True).argmax())
    token_id = place if token_ids is None else int(token_ids[place])
    return Drafted(token_id, confidence_of(logits, place, judge))
