"""The operations on rows of neurons in plain torch, see reference.py."""

from typing import Any

import torch

from hetero_ee_kernels.reference import SMALLEST, quantized
from hetero_ee_kernels.row_matrix import NO_SKIPS, UNIT_COLUMNS, RowMatrix, Skips

NEURON_BLOCK = 128  # neurons that share the scales of their weights


def masked_linear(
    x: Any, scores: Any, rows: RowMatrix, out: Any = None, *, bias: Any = None, may_skip: Any = None, n_used: Any = None
) -> Any:
    """Compute the product row by row, reading only the neurons that the row needs."""
    out = x.new_empty(len(x), rows.n_rows) if out is None else out
    for row, target in enumerate(out):
        skips = may_skip is not None and bool(may_skip[row])
        neurons = (scores[row] > 0 if skips else torch.ones_like(target)).nonzero()[:, 0]
        if n_used is not None and skips:
            n_used += len(neurons)
        product = _row_products(x[row : row + 1], rows, neurons).float() * rows.factor
        target.zero_()
        target[neurons] = product if bias is None else product + bias[neurons]
    return out


def sparse_ffn(
    x: Any,
    active: Any,
    up: RowMatrix | None,
    down: RowMatrix,
    out: Any = None,
    skips: Skips = NO_SKIPS,
) -> Any:
    """Compute the FFN row by row, reading only active neurons. It sums in float64 and rounds where the kernel does."""
    out = active.new_empty(len(active), down.n_columns) if out is None else out
    for row in range(len(active)):
        h, neurons = _needed(row, x, active, up, skips)
        out[row] = _neurons_sum(h, down, neurons).float() * down.factor
    return out


def first_sections(
    x: Any,
    active: Any,
    up: RowMatrix | None,
    down: RowMatrix,
    n_section_blocks: int,
    out: Any = None,
    skips: Skips = NO_SKIPS,
) -> Any:
    """Return the sums of the first sections without down's factor; for the rest, see sparse_ffn."""
    size, width = 128 * n_section_blocks, UNIT_COLUMNS * down.n_units
    out = active.new_empty(down.n_rows // size, len(active), width) if out is None else out
    out.zero_()
    for row in range(len(active)):
        h, neurons = _needed(row, x, active, up, skips)
        for section in range(len(out)):
            mine = neurons // size == section
            out[section, row, : down.n_columns] = _neurons_sum(h[mine], down, neurons[mine]).float()
    return out


def fold_sections(sums: Any, down: RowMatrix, out: Any, rest: Any = None) -> Any:
    """Add the sections in the same order as the kernel."""
    total = torch.zeros_like(out) if rest is None else rest
    for section in range(len(sums) - 1, -1, -1):
        total = total + sums[section, :, : down.n_columns]
    return torch.mul(total, down.factor, out=out)


def _needed(row: int, x: Any, active: Any, up: RowMatrix | None, skips: Skips) -> tuple[Any, Any]:
    """Return a token's h of active neurons, and their numbers."""
    token, may_skip = active[row], skips.may_skip is not None and bool(skips.may_skip[row])
    is_active = token != 0
    if skips.least is not None and may_skip:
        is_active &= ~(token.abs() < skips.least)
    neurons = is_active.nonzero()[:, 0]
    if skips.n_used is not None and may_skip:
        skips.n_used.add_(len(neurons))
    h = token[neurons]
    if up is not None:
        h = h * (_row_products(x[row : row + 1], up, neurons).float() * up.factor)
    return h, neurons


def _row_products(x: Any, up: RowMatrix, rows: Any) -> Any:
    """Multiply x (1, K), after quantizing it, by these rows without their exponent; return float64."""
    codes, scales = (part[0, : 2 * up.n_units] for part in quantized(x))
    sums = (_row_entries(up, rows) * codes.int()).sum(-1)
    return (sums.double() * up.scales[rows].double() * scales.double()).sum(-1)


def _neurons_sum(h: Any, down: RowMatrix, rows: Any) -> Any:
    """Return the sum of h times these rows without their exponent, float64 (K,). Weights are rounded per block."""
    n_blocks, block = -(-down.n_rows // NEURON_BLOCK), rows // NEURON_BLOCK
    values = h[:, None] * down.scales[rows].float()
    where = block[:, None].expand(values.shape)
    largest = values.new_zeros(n_blocks, values.shape[1]).scatter_reduce_(0, where, values.abs(), "amax")
    is_zero, top = largest < SMALLEST, torch.full_like(largest, 127.0)
    codes = (values * torch.where(is_zero, 0.0, top / largest)[block]).round().nan_to_num(0.0).int()
    sums = torch.zeros((n_blocks, values.shape[1], 32), dtype=torch.int32, device=h.device)
    sums.index_add_(0, block, _row_entries(down, rows) * codes[:, :, None])
    factors = torch.where(is_zero, 0.0, largest / top)
    return (sums.double() * factors.double()[:, :, None]).sum(0).flatten()[: down.n_columns]


def _row_entries(weight: RowMatrix, rows: Any) -> Any:
    """Return the codebook entries of these rows, int32 (rows, groups, 32)."""
    units = weight.codes[rows].view(len(rows), -1, 32)
    codes = torch.stack([units & 15, units >> 4], dim=2).view(len(rows), 2 * weight.n_units, 32)
    return torch.tensor(weight.codebook, dtype=torch.int32, device=codes.device)[codes.int()]
