"""What a matrix in tiles means (docs/FORMAT.md)."""

from typing import Any

import torch

from hetero_ee_kernels.tile_matrix import TileMatrix


def dequantize(weight: TileMatrix) -> Any:
    """All of W with its padding, fp32 (N padded to 16, K padded to 32): (scale x 2^exponent) x entry."""
    n_blocks, n_groups = weight.n_blocks, weight.n_groups
    if weight.codebook is None:
        lines = weight.tiles.view(n_blocks, n_groups, 8, 16, 4)  # b g j r c
        entries = lines.permute(0, 3, 1, 2, 4)
    else:
        lines = weight.tiles.view(n_blocks, n_groups, 4, 16, 4)
        codes = torch.stack([lines & 15, lines >> 4], dim=2).permute(0, 4, 1, 2, 3, 5)  # b r g half j c
        entries = torch.tensor(weight.codebook, device=codes.device)[codes.int()]
    factors = weight.scales.permute(0, 2, 1).reshape(n_blocks * 16, n_groups, 1).float() * weight.factor
    return (entries.reshape(n_blocks * 16, n_groups, 32).float() * factors).view(n_blocks * 16, n_groups * 32)
