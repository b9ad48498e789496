"""Our implementations of the methods of GPTQ and AWQ, to compare with: 4 bits, a fp16 scale for each group of columns.

Groups have 128 columns, or 64 where 128 doesn't divide a matrix's columns. The searches take the second moments of the
inputs instead of the inputs.
"""

import math

import torch
from torch import Tensor

BITS = 4
DAMPING = 0.01  # GPTQ's, of the mean second moment
GRID = 20  # AWQ's exponents, 0 to 0.95
SHRINKS = 10  # AWQ's ranges of a group, 1 to 0.55 of its own


def group_columns(n_columns: int) -> int:
    return math.gcd(n_columns, 128)


def n_bits(weight: Tensor, *, has_zeros: bool) -> int:
    """Return the bits of codes, scales and 4-bit zero points. GPTQ's order of columns is not counted."""
    return weight.numel() * BITS + weight.numel() // group_columns(weight.shape[1]) * (16 + BITS * has_zeros)


def gptq(weight: Tensor, moments: Tensor) -> Tensor:
    """Round a matrix (N, K) by GPTQ (arXiv 2210.17323): symmetric, columns with the largest inputs first.

    As in the paper's code, groups are consecutive in that order, and have the scale of their largest weight when their
    turn comes.

    Args:
        moments: the mean of x x^T over the inputs x, (K, K).

    Returns: the values of the rounded weights.
    """
    order, size = torch.argsort(moments.diagonal(), descending=True, stable=True), group_columns(weight.shape[1])
    damped = moments[order][:, order] + torch.eye(len(moments)) * DAMPING * moments.diagonal().mean()
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    columns = weight.T[order].contiguous()
    for first in range(0, len(columns), size):
        end = first + size
        scales = (columns[first:end].abs().amax(0) / (2**BITS - 1) * 2).clamp_min(1e-7).half().float()
        errors = torch.empty(size, len(weight))
        for column in range(first, end):
            rounded = (columns[column] / scales).round().clamp(-(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1) * scales
            errors[column - first] = (columns[column] - rounded) / factor[column, column]
            columns[column + 1 : end].addr_(factor[column, column + 1 : end], errors[column - first], alpha=-1)
            columns[column] = rounded
        columns[end:] -= factor[first:end, end:].T @ errors
    return columns[torch.argsort(order)].T.contiguous()


def awq(weight: Tensor, moments: Tensor) -> Tensor:
    """Round a matrix (N, K) by AWQ (arXiv 2306.00978), with zero points and a search of each group's range.

    Each column is scaled by a power of its inputs' magnitude: the root of their mean square, as moments have no mean of
    magnitudes. The power with the least error of products is taken. A checkpoint has to fold these scales into
    the tensor before; here, each matrix has its own even where that is impossible.

    Args and returns: as `gptq`.
    """
    magnitudes, best, least = moments.diagonal().sqrt().clamp_min(1e-4), torch.ones(len(moments)), math.inf
    for step in range(GRID):
        scales = magnitudes ** (step / GRID)
        scales /= (scales.max() * scales.min()).sqrt()
        errors = weight - min_max(weight * scales) / scales
        if (error := float(((errors @ moments) * errors).sum())) < least:
            least, best = error, scales
    return _clipped(weight * best, moments / torch.outer(best, best)) / best


def _clipped(weight: Tensor, moments: Tensor) -> Tensor:
    """Round with the share of each group's range that has the least error of the group's products."""
    size = group_columns(weight.shape[1])
    squares = torch.stack(
        [moments[first : first + size, first : first + size] for first in range(0, len(moments), size)]
    )
    found, least = torch.empty_like(weight), torch.full((len(weight), len(squares)), math.inf)
    for step in range(SHRINKS):
        rounded = min_max(weight, 1 - step / (2 * SHRINKS))
        errors = (weight - rounded).view(len(weight), -1, size)
        now = (torch.einsum("ngk,gkl->ngl", errors, squares) * errors).sum(-1)
        found = torch.where((now < least).repeat_interleave(size, 1), rounded, found)
        least = torch.minimum(now, least)
    return found


def min_max(weight: Tensor, share: float = 1.0) -> Tensor:
    """Round to 16 steps between this share of the least and of the largest weight of each group."""
    groups = weight.view(len(weight), -1, group_columns(weight.shape[1]))
    low, high = (groups.amin(-1, True) * share).clamp_max(0), (groups.amax(-1, True) * share).clamp_min(0)
    scales = ((high - low) / (2**BITS - 1)).clamp_min(1e-7).half().float()
    zeros = (-low / scales).round().clamp(0, 2**BITS - 1)
    codes = ((groups / scales).round() + zeros).clamp(0, 2**BITS - 1)
    return ((codes - zeros) * scales).view_as(weight)
