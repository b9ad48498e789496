"""The FFN's activation as in ../activate.py."""

from typing import Any

import torch
import torch.nn.functional as F


def activate(x: Any, kind: str, out: Any = None, *, gated: bool, threshold: float = 0.0) -> Any:
    """x: fp32 (m, 2F) where gated, else (m, F); out: (m, F), allocated where None. Returns out."""
    n_outputs = x.shape[1] // 2 if gated else x.shape[1]
    out = x.new_empty(len(x), n_outputs) if out is None else out
    for row, target in zip(x, out, strict=True):
        active = _activated(row[:n_outputs].clone(), kind, threshold)  # a clone is aligned, a view need not be
        target.copy_(active * row[n_outputs:] if gated else active)
    return out


def _activated(x: Any, kind: str, threshold: float) -> Any:
    match kind:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "fatrelu":
            return torch.where(x >= threshold, x, 0.0)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
    raise ValueError(f"no activation called {kind}.")
