"""The operations of route.py and experts.py in plain torch on the same tensors, as reference and as fallback."""

from typing import Any

import torch

from hetero_ee_kernels.expert_pairs import Pairs
from hetero_ee_kernels.reference import matmul
from hetero_ee_kernels.tile_matrix import TileMatrix


def fp32_product(x: Any, weights: Any, out: Any = None) -> Any:
    """Return x W^T, one row after the other, so that a row's bits don't depend on the others."""
    product = torch.stack([torch.mv(weights, row.clone()) for row in x])
    return product if out is None else out.copy_(product)


def route(
    x: Any, weights: Any, vectors: tuple[Any, Any, Any], n_active: int, kind: str, out: Any = None, **how: Any
) -> Any:
    logits = fp32_product(x, weights)
    found = choose(logits if vectors[0] is None else logits + vectors[0], vectors[1:], n_active, kind, **how)
    return found if out is None else out.copy_(found)


def choose(
    logits: Any,
    vectors: tuple[Any, Any],
    n_active: int,
    kind: str,
    *,
    renormalizes: bool,
    scale: float,
    added: float,
    groups: tuple[int, int, int] = (1, 1, 1),
) -> Any:
    """Choose experts by logits (m, n_experts), which include the bias. vectors: the choice bias and factors."""
    (choice_bias, factors), scores = vectors, torch.sigmoid(logits) if kind == "sigmoid" else logits
    keys = scores if choice_bias is None else scores + choice_bias
    lowest = torch.finfo(torch.float32).min  # above the keys of groups that are not chosen
    keys = keys.nan_to_num(lowest, torch.inf, lowest)
    n_groups, n_chosen, n_best = groups
    if n_chosen < n_groups:
        by_group = keys.view(len(keys), n_groups, -1)
        order = by_group.topk(n_best).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        left_out = torch.zeros(len(keys), n_groups, dtype=torch.bool, device=keys.device)
        left_out.scatter_(1, order[:, n_chosen:], True)
        keys = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)
    chosen = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :n_active]
    chosen = chosen.sort(dim=-1, descending=True).values
    if kind == "softmax_of_chosen":
        weights = torch.softmax(logits.gather(1, chosen), -1)
    else:
        weights = (scores if kind == "sigmoid" else torch.softmax(logits, -1)).gather(1, chosen)
    if renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + added)
    weights = weights * scale
    return torch.cat([chosen.float(), weights if factors is None else weights * factors[chosen]], 1)


def expert_matmul(x: Any, weight: TileMatrix, pairs: Pairs, out: Any, bias: Any = None) -> Any:
    n_rows, n_shared = out.shape[-1], pairs.n_pairs // len(x)
    places = torch.arange(pairs.n_pairs, device=x.device) if pairs.order is None else pairs.order.long()
    experts = pairs.experts.flatten().repeat_interleave(len(places) // pairs.experts.numel())
    for expert in range(weight.n_rows // n_rows):
        mine = places[(experts == expert) & (places >= 0)]
        rows, blocks = (slice(expert * size, (expert + 1) * size) for size in (n_rows, n_rows // 16))
        if len(mine):
            product = matmul(x[mine // n_shared], weight.with_tiles(weight.tiles[blocks], weight.scales[blocks]))
            out[mine] = product if bias is None else product + bias[rows]
    return out


def add_experts(outputs: Any, routes: Any, start: int, n_experts: int, sums: Any, out: Any) -> Any:
    chosen, weights = routes.chunk(2, 1)
    is_here = (chosen >= start) & (chosen < start + n_experts)
    total = torch.zeros_like(out) if sums is None else sums
    outputs = outputs.view(*chosen.shape, -1)
    for place in range(chosen.shape[1]):
        more = outputs[:, place] * weights[:, place, None]  # rounded before it is added
        total = torch.where(is_here[:, place, None], total + more, total)
    return out.copy_(total)
