"""Cosines and sines by position, for kv_write.py."""

from collections.abc import Sequence
from typing import Any

import torch

CHUNK = 4096  # positions at a time, so that float64 takes little room


def rope_table(inverse_frequencies: Sequence[float], magnitude: float, n_positions: int, device: Any) -> Any:
    """fp32 (n_positions, 2, pairs) on the device: cosine and sine of position x frequency, times magnitude.

    The angle is rounded to fp32, as in training; its cosine comes from float64, so that every device has one table.
    """
    frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
    table = torch.empty(n_positions, 2, len(frequencies), device=device)
    for first in range(0, n_positions, CHUNK):
        end = min(first + CHUNK, n_positions)
        angles = (torch.arange(first, end, dtype=torch.float32)[:, None] * frequencies).double()
        turns = torch.stack([angles.cos(), angles.sin()], dim=1) * magnitude
        table[first:end] = turns.float().to(device)
    return table
