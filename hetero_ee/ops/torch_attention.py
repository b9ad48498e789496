"""Attention in plain torch, fp32: (m, heads, key size) -> (m, heads, value size). Query heads share key heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache


def attend_by_row(
    queries: Tensor,
    cache: CpuKvCache,
    layer: int,
    batch: Batch,
    window: int | None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Let each token attend to its sequence up to itself. A token's bits do not depend on its batch.

    Args:
        window: number of positions that a token sees, including its own; None for all.
        scale: factor of the scores, 1 / sqrt(head_dim) if None.
        cap: limit of the scores, cap tanh(score / cap); 0 for none.
        sinks: a score per head (heads,) that takes part in the softmax and has no value.
    """
    outputs = []
    for row in range(len(batch)):
        keys, values = _seen(cache, layer, batch, row, window)
        outputs.append(_attended(queries[row : row + 1], keys, values, None, scale, cap, sinks))
    return torch.cat(outputs)


def attend_by_sequence(
    queries: Tensor,
    cache: CpuKvCache,
    layer: int,
    batch: Batch,
    window: int | None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention like `attend_by_row`, for all tokens of a sequence together."""
    if batch.paths:
        return attend_by_row(queries, cache, layer, batch, window, scale, cap, sinks)
    outputs = queries.new_empty(*queries.shape[:2], cache.value_dim)
    positions = torch.tensor(batch.positions)
    for sequence in sorted(set(batch.sequences)):
        mine = torch.tensor([row for row, owner, _ in batch.entries() if owner == sequence])
        first = 0 if window is None else max(0, int(positions[mine].min()) + 1 - window)
        keys, values = cache.read(layer, sequence, first, int(positions[mine].max()) + 1)
        distance = positions[mine, None] - torch.arange(first, first + keys.shape[1])
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        if cap or sinks is not None:
            outputs[mine] = _attended(queries[mine], keys, values, seen, scale, cap, sinks)
            continue
        heads = queries[mine].transpose(0, 1)[None], keys[None], values[None]
        attended = F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True, scale=scale)
        outputs[mine] = attended[0].transpose(0, 1)
    return outputs


def _seen(cache: CpuKvCache, layer: int, batch: Batch, row: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return keys and values (kv_heads, n, features) of the positions that a token sees, in their order."""
    position, sequence = batch.positions[row], batch.sequences[row]
    first = 0 if window is None else max(0, position + 1 - window)
    if not batch.paths or not batch.paths[row]:
        return cache.read(layer, sequence, first, position + 1)
    slots = torch.tensor(batch.seen(row, first))
    keys, values = cache.read(layer, sequence, int(slots.min()), int(slots.max()) + 1)
    return keys[:, slots - slots.min()], values[:, slots - slots.min()]


def _attended(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    scale: float | None,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend within one sequence, to keys and values (kv_heads, n, features) where seen (m, n); None sees all."""
    m, n_heads, head_dim = queries.shape
    grouped = queries.transpose(0, 1).reshape(keys.shape[0], -1, head_dim)  # a key head's queries, head by head
    scores = torch.bmm(grouped, keys.transpose(1, 2)) * (1 / math.sqrt(head_dim) if scale is None else scale)
    scores = (cap * torch.tanh(scores / cap) if cap else scores).view(n_heads, m, -1)
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(n_heads, 1, 1).expand(-1, m, -1)], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[1]]
    attended = torch.bmm(weights.reshape(keys.shape[0], -1, keys.shape[1]), values)
    return attended.view(n_heads, m, values.shape[2]).transpose(0, 1)
