"""RMSNorm and LayerNorm as in ../norm.py, one row at a time: torch's own sums round by the shape of the batch."""

from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: Any, scale: Any, eps: float, out: Any = None, *, delta: Any = None) -> Any:
    """x, delta: fp32 (m, n), x += delta in place first; scale: fp32 (n,) or None; out: (m, n). Returns out."""
    out = torch.empty_like(x) if out is None else out
    if delta is not None:
        x += delta
    for row, target in zip(x, out, strict=True):
        target.copy_(F.rms_norm(row, row.shape, scale, eps))
    return out


def layer_norm(x: Any, scale: Any, bias: Any, eps: float, out: Any = None, *, delta: Any = None) -> Any:
    """As rms_norm, with bias: fp32 (n,) or None."""
    out = torch.empty_like(x) if out is None else out
    if delta is not None:
        x += delta
    for row, target in zip(x, out, strict=True):
        target.copy_(F.layer_norm(row, row.shape, scale, bias, eps))
    return out


def rms_norm_heads(x: Any, scale: Any, eps: float, first: int, n_heads: int) -> None:
    """In place, each of n_heads heads of len(scale) features from feature `first` of x (m, features) on."""
    n = scale.numel()
    for row in x:
        heads = row[first : first + n_heads * n].view(n_heads, n)
        heads.copy_(F.rms_norm(heads, (n,), scale, eps))
