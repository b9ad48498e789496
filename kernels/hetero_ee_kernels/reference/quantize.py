"""Activations to int8 as in ../quantize.py."""

from typing import Any

import torch

SMALLEST = 1e-30


def quantize(x: Any) -> tuple[Any, Any]:
    """x: fp32 or fp16 (m, K) -> codes int8 (m, G, 32), scales fp32 (m, G)."""
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32))
    x = x.view(len(x), x.shape[1] // 32, 32)
    largest = x.abs().amax(-1)
    tiny = largest < SMALLEST
    top = torch.full_like(largest, 127.0)  # torch multiplies by a rounded inverse where one side is a number
    scaled = x * torch.where(tiny, 0.0, top / largest)[..., None]
    return scaled.round().nan_to_num(0.0).to(torch.int8), torch.where(tiny, 0.0, largest / top)
