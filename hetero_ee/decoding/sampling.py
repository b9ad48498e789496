"""Sampling: chooses the next token from logits and from noise that depends only on the position.

Gumbel-max: argmax(logits / temperature + g) with g = -log(-log(u)) draws from softmax(logits / temperature). The noise
of a position is a function of (seed, sequence, position). So it does not matter how, or in which batch, the previous
tokens were computed, and a draft can be compared with the very token that the full model draws. Derived.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hetero_ee.errors import HeteroError
from hetero_ee.options.sampling import SamplingParams
from hetero_ee.runtime.choice import Noise, all_finite, gumbel_noise, tempered

Allowed = NDArray[np.bool_]  # (vocab,), by token id
MAX_RUNS = 500  # of equal scores that are put in order one by one: half the time of sorting 32,000 again


def choose_token(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    sequence: int,
    position: int,
    *,
    noise: Noise | None = None,
    n_prompt_tokens: int = 0,
    allowed: Allowed | None = None,
) -> int:
    """Return the token at `position`, from logits (vocab,) fp32 and all previous token ids. The lowest id wins a tie.

    Args:
        noise: Returns the noise, like gumbel_noise or RememberedNoise.
        n_prompt_tokens: Number of tokens at the start of the history that are the prompt.
        allowed: Mask of the tokens to choose from, at least one; None for all.

    Raises: HeteroError: if the logits are not finite.
    """
    if not all_finite(logits):
        raise HeteroError(f"the model's logits at position {position} are not finite; its weights may be damaged.")
    if params.temperature == 0:
        scores = _only(allowed, _changed(logits, history, params, n_prompt_tokens))
        return int(scores.numpy(force=True).argmax())  # NumPy's argmax takes a tenth of the time of torch's
    noisy = filtered_scores(logits, history, params, n_prompt_tokens, allowed)
    noisy += (noise or gumbel_noise)(len(noisy), params.seed, sequence, position)
    return int(noisy.numpy().argmax())


class RememberedNoise:
    """Cache of gumbel_noise: the noise computed to choose a draft is used again to verify it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int, int], Tensor] = {}

    def of_draft(self, n_tokens: int, seed: int, sequence: int, position: int) -> Tensor:
        """Return gumbel_noise and keep it for the verification."""
        key = n_tokens, seed, sequence, position
        if key not in self._kept:
            self._kept[key] = gumbel_noise(*key)
        return self._kept[key]

    def close(self, sequence: int) -> None:
        self._kept = {key: noise for key, noise in self._kept.items() if key[2] != sequence}

    def of_token(self, n_tokens: int, seed: int, sequence: int, position: int) -> Tensor:
        """Return gumbel_noise and drop it from the cache."""
        key = n_tokens, seed, sequence, position
        return self._kept.pop(key) if key in self._kept else gumbel_noise(*key)


def filtered_scores(
    logits: Tensor,
    history: Sequence[int],
    params: SamplingParams,
    n_prompt_tokens: int = 0,
    allowed: Allowed | None = None,
) -> Tensor:
    """Return float64 scores (vocab,), from whose softmax choose_token draws at temperature > 0; -inf excludes."""
    scores = _only(allowed, _changed(logits, history, params, n_prompt_tokens))
    return _filtered(tempered(scores, params.temperature), params)


def _only(allowed: Allowed | None, scores: Tensor) -> Tensor:
    """Set tokens that are not allowed to -inf. Temperature and filters then apply to the allowed tokens."""
    if allowed is None:
        return scores
    return scores.cpu().masked_fill(torch.from_numpy(~allowed), -math.inf)


def _changed(logits: Tensor, history: Sequence[int], params: SamplingParams, n_prompt_tokens: int) -> Tensor:
    """Apply the repeat penalty, then additive changes, in this order so that the penalty does not scale those."""
    if not params.changes_logits:
        return logits
    added = dict(params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in Counter(history[n_prompt_tokens:]).items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            added[token_id] = added.get(token_id, 0.0) - penalty
    scores = _penalized(logits, history, params.repeat_penalty)
    ids = torch.tensor(list(added), dtype=torch.int64)
    return scores.index_add(0, ids, torch.tensor(list(added.values()), dtype=scores.dtype))


def _penalized(logits: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    if penalty == 1 or not history:
        return logits
    seen = torch.tensor(sorted(set(history)))
    chosen = logits[seen]
    return logits.index_put((seen,), torch.where(chosen > 0, chosen / penalty, chosen * penalty))


def _filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """Set the tokens that top-k, then top-p, then min-p exclude to -inf. The lowest ids win ties at the edge."""
    n_kept = len(scores) if params.top_k == 0 else min(params.top_k, len(scores))
    if n_kept == len(scores) and params.top_p == 1 and params.min_p == 0:
        return scores
    order = torch.from_numpy(best_first(scores.numpy(), n_kept))
    values = scores[order]
    probabilities = torch.softmax(values, 0)
    if params.top_p < 1:
        before = torch.cumsum(probabilities, 0) - probabilities  # probability of all better candidates
        n_kept = max(1, int((before < params.top_p).sum()))
        values, order = values[:n_kept], order[:n_kept]
        probabilities = torch.softmax(values, 0)
    kept = order[probabilities >= params.min_p * probabilities[0]]
    return torch.full_like(scores, -math.inf).index_copy(0, kept, scores[kept])


def best_first(scores: NDArray[np.float64], n_kept: int) -> NDArray[np.int64]:
    """Return the ids of the n_kept largest scores, largest first, lowest id first among equals.

    NumPy's fast partition and sort don't keep the order of equals, which is then corrected. This needs a tenth of the
    time of a stable sort of all scores.
    """
    n_left_out = len(scores) - n_kept
    if n_left_out > 0:
        edge = np.partition(scores, n_left_out)[n_left_out]
        ids = np.flatnonzero(scores >= edge)
        return ids[np.argsort(-scores[ids], kind="stable")[:n_kept]]
    order = np.argsort(-scores)
    ordered = scores[order]
    is_equal = np.concatenate(([False], ordered[1:] == ordered[:-1], [False]))  # to the one before
    edges = np.flatnonzero(is_equal[1:] != is_equal[:-1])  # where runs of equals begin, and their last places
    if len(edges) > 2 * MAX_RUNS:
        return np.argsort(-scores, kind="stable")
    for first, last in edges.reshape(-1, 2):
        order[first : last + 1].sort()
    return order
