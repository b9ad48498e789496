"""The pairs of a token and an expert that it has chosen, in the order in which a GPU multiplies them.

The pairs of a token are adjacent, in the order of its choices. In a decode pass each program multiplies one pair, so
that launches don't depend on the choices; pairs of one expert find its tiles in the L2 cache. For prompts, pairs are
sorted by expert, and a program multiplies several of one expert.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hetero_ee_kernels.tile_matrix import GCN, TileMatrix

FEW_TOKENS = 16  # in a decode pass
MOST_PER_PROGRAM = 32  # rows of codes


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A batch's pairs, in the order in which programs multiply them."""

    experts: Any  # fp32 (n_programs,): index of each program's expert; outside of this device's for others
    order: Any  # int32 (n,): number of the pair in each place, -1 for none; None if all are in order
    n_pairs: int
    n_tokens: int  # rows of codes per program


def pairs_of(routes: Any, start: int, n_experts: int, weight: TileMatrix) -> Pairs:
    """Return the pairs of n_experts experts from index `start` on. The host does not wait for the GPU.

    Args:
        routes: fp32 (m, 2 n_active), indices of experts and then their weights.
        weight: one of the experts' matrices.
    """
    chosen = routes[:, : routes.shape[1] // 2] - start
    n = chosen.numel()
    if len(routes) <= FEW_TOKENS or weight.isa == GCN:
        return Pairs(chosen, None, n, 1)
    rows = weight.n_terms * n / max(1, n_experts)  # of an expert, on average
    n_tokens = 8 if rows <= 8 else 16 if rows <= 16 else MOST_PER_PROGRAM
    each = n_tokens // weight.n_terms
    expert = torch.where((chosen >= 0) & (chosen < n_experts), chosen, n_experts).long().flatten()
    order = expert.argsort(stable=True)
    counts = torch.zeros(n_experts + 1, dtype=torch.int64, device=routes.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    n_programs = (counts + each - 1) // each
    n_programs[n_experts] = 0
    ends, most = n_programs.cumsum(0), min(n, (n + n_experts * (each - 1)) // each)
    sorted_experts = expert[order]
    place = torch.arange(n, device=routes.device) - (counts.cumsum(0) - counts)[sorted_experts]
    place = torch.where(sorted_experts < n_experts, place + each * (ends - n_programs)[sorted_experts], each * most)
    placed = torch.full((each * most + 1,), -1, dtype=torch.int32, device=routes.device)
    placed[place] = order.int()
    program = torch.arange(most, device=routes.device)
    return Pairs(torch.searchsorted(ends[:n_experts], program, right=True).float(), placed[:-1], n, n_tokens)
