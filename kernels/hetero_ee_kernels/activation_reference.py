"""The activation functions in plain torch, as the reference for all devices."""

from typing import Any

import torch
import torch.nn.functional as F


def activated(x: Any, kind: str, threshold: float) -> Any:
    """Apply the activation function called `kind`; see hetero_ee_kernels.activate for the formulas."""
    match kind:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "fatrelu":
            return torch.where(x >= threshold, x, 0.0)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "softcap":
            return threshold * torch.tanh(x / threshold)
        case "clamped_silu":
            clamped = x.clamp(max=threshold)
            return clamped * torch.sigmoid(1.702 * clamped)
    raise ValueError(f"Unknown activation {kind}.")
