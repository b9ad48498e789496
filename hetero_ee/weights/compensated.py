"""Quantize a matrix for the inputs that it multiplies: least error of its products, not of its weights.

With second moments H of the inputs (K, K), weights W and quantized weights V, the mean squared error of products is
tr((W - V) H (W - V)^T). Scales are searched by a diagonal approximation of it. Then columns are rounded one after the
other, those with the largest inputs first. Each rounds its weights plus what the errors of earlier columns add to them
(GPTQ, arXiv 2210.17323, in the form without inverses of arXiv 2307.13304, section 3.2). At last the scales are refitted
with the codes fixed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_ee.weights import tiles as layout
from hetero_ee.weights.codebook import Codebook, Integers, safe_inverse
from hetero_ee.weights.quantizers import (
    SEARCH_STEPS,
    Workers,
    fit_codebook,
    magnitude_of,
    padded_groups,
    to_fp16_scales,
)
from hetero_ee.weights.weight import TileWeight

MOST_COLUMNS = 12288  # columns whose errors compensate each other; limits memory to four matrices of 0.6 GB
BLOCK_COLUMNS = 64  # columns that are rounded before their errors reach all later ones in one product
CHUNK_ROWS = 512  # rows per task of a thread
DAMPING = 0.01  # of the mean second moment, added to each, as in GPTQ
# Exponent of the inputs' mean squares as weights of the search. With compensation, 0.5 had up to 10 % less error than 0
# and up to 5 % less than 1 (SmolLM2-135M, layer 10, 2026-11-28).
IMPORTANCE_EXPONENT = 0.5
STAY = 1e-3  # share of a scale's own curvature that pulls its refit towards the searched scale


def spans(n_columns: int) -> list[slice]:
    """Return the parts of a matrix's columns whose errors compensate each other, in whole groups."""
    n_spans = -(-n_columns // MOST_COLUMNS)
    size = -(-n_columns // (n_spans * layout.TILE_COLUMNS)) * layout.TILE_COLUMNS
    return [slice(first, min(first + size, n_columns)) for first in range(0, n_columns, size)]


def quantize_for_inputs(
    weight: Tensor, moments: Sequence[Tensor], name: str = "int4", workers: Workers = map
) -> TileWeight:
    """Quantize a float matrix (N, K) to the layout `name`, for inputs with these second moments.

    The bytes do not depend on `workers`.

    Args:
        moments: fp32, the mean of x x^T over the inputs x of each of spans(K).
        name: "int4", whose codebook is fitted, "int5", "int6" or "int8".
    """
    magnitude = magnitude_of(weight)
    damped = [_damped(moment) for moment in moments]
    importance = torch.cat([each.diagonal() for each in damped]) ** IMPORTANCE_EXPONENT
    importance[weight.shape[1] :] = 0
    entries = fit_codebook(weight, importance[: weight.shape[1]]) if name == "int4" else None
    codebook = Integers(name) if entries is None else Codebook(torch.tensor(entries, dtype=torch.float32))
    chunks, size = range(0, len(weight), CHUNK_ROWS), codebook.group_columns

    def groups_of(first: int) -> Tensor:
        groups = padded_groups(weight[first : first + CHUNK_ROWS]) * 2.0**-magnitude
        return groups.view(len(groups), -1, size)

    def searched(first: int) -> Tensor:
        return codebook.scales(groups_of(first), importance.view(1, -1, size), SEARCH_STEPS)

    scales, exponent = to_fp16_scales(torch.cat(list(workers(searched, chunks))), magnitude)
    stored = scales.float() * 2.0 ** (exponent - magnitude)
    rounding = [_Rounding(each) for each in damped]

    def rounded(first: int) -> tuple[Tensor, Tensor]:
        groups, steps, start = groups_of(first), stored[first : first + CHUNK_ROWS], 0
        parts = list[tuple[Tensor, Tensor]]()
        for each in rounding:
            mine = slice(start, start + each.n_columns // size)
            parts.append(each.round(groups[:, mine].flatten(1), steps[:, mine], codebook))
            start = mine.stop
        codes, refitted = zip(*parts, strict=True)
        return torch.cat(codes, 1), torch.cat(refitted, 1)

    codes, refitted = zip(*workers(rounded, chunks), strict=True)
    scales, exponent = to_fp16_scales(torch.cat(refitted), magnitude)
    packed = layout.pack_numbers(scales.view(len(scales), -1, layout.TILE_COLUMNS // size))
    return TileWeight(layout.pack(torch.cat(codes), name), packed, exponent, entries, *weight.shape)


def _damped(moments: Tensor) -> Tensor:
    """Return second moments in units of their mean, padded to whole groups, with DAMPING added."""
    mean, n_missing = moments.diagonal().mean().clamp_min(1e-30), -len(moments) % layout.TILE_COLUMNS
    padded = torch.nn.functional.pad(moments / mean, (0, n_missing, 0, n_missing))
    padded.diagonal().add_(DAMPING)
    return padded


class _Rounding:
    """Rounds the columns of one span, for damped second moments (K, K)."""

    def __init__(self, moments: Tensor) -> None:
        self._moments, self._order = moments, torch.argsort(moments.diagonal(), descending=True, stable=True)
        self._feedback = _feedback(moments[self._order][:, self._order])
        self.n_columns = len(moments)

    def round(self, weight: Tensor, scales: Tensor, codebook: Codebook | Integers) -> tuple[Tensor, Tensor]:
        """Return codes (n, K), and refitted scales (n, g), for weights (n, K) and scales (n, g) of some rows."""
        codes = self._codes(weight, scales, codebook)
        return codes, self._refitted(weight, codebook.values(codes), scales)

    def _codes(self, weight: Tensor, scales: Tensor, codebook: Codebook | Integers) -> Tensor:
        columns = weight.T[self._order]  # (K, n), so that a column is contiguous
        steps = scales.T[self._order // codebook.group_columns]
        inverse, errors = safe_inverse(steps), torch.zeros_like(columns)
        codes = codebook.codes(torch.zeros_like(columns))
        for first in range(0, len(columns), BLOCK_COLUMNS):
            end = first + BLOCK_COLUMNS
            targets = columns[first:end] + self._feedback[:first, first:end].T @ errors[:first]
            for index, target in enumerate(targets):
                column = first + index
                codes[column] = codebook.codes(target * inverse[column])
                errors[column] = columns[column] - codebook.values(codes[column]) * steps[column]
                targets[index + 1 :].addr_(self._feedback[column, column + 1 : end], errors[column])
        found = torch.empty_like(codes)
        found[self._order] = codes
        return found.T.contiguous()

    def _refitted(self, weight: Tensor, entries: Tensor, scales: Tensor) -> Tensor:
        """Return the scales with the least squared error of products, by the normal equations of each row.

        Scales of 0 stay, and so do those of a row whose equations have no sound solution.
        """
        n_rows, n_groups = scales.shape
        size = weight.shape[1] // n_groups
        squares = torch.zeros(n_rows, n_groups, n_groups)  # its lower triangle
        for group in range(n_groups):
            first, end = group * size, (group + 1) * size
            products = (entries[:, first:end] @ self._moments[first:end, :end]) * entries[:, :end]
            squares[:, group, : group + 1] = products.view(n_rows, group + 1, -1).sum(-1)
        errors = weight - entries * scales.repeat_interleave(size, dim=1)
        missing = ((errors @ self._moments) * entries).view(n_rows, n_groups, -1).sum(-1)
        squares.diagonal(dim1=1, dim2=2).mul_(1 + STAY)
        factors, failed = torch.linalg.cholesky_ex(squares)
        change = torch.cholesky_solve(missing[:, :, None], factors)[:, :, 0]
        is_sound = (failed == 0)[:, None] & (scales != 0) & change.isfinite().all(-1, keepdim=True)
        return torch.where(is_sound, scales + change, scales)


def _feedback(moments: Tensor) -> Tensor:
    """Return the unit upper triangular factor U of moments = U D U^T, whose column k weighs earlier errors for k."""
    reversed_moments, failed = moments.flip(0, 1), torch.ones(())
    for added in (0.0, DAMPING, 10 * DAMPING, 100 * DAMPING):  # more damping only if rounding errors need it
        reversed_moments.diagonal().add_(added)
        lower, failed = torch.linalg.cholesky_ex(reversed_moments)
        if not failed:
            upper: Tensor = lower.flip(0, 1)
            return upper / upper.diagonal()
    return torch.eye(len(moments))  # rounds to nearest
