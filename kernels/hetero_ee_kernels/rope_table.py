"""The table of cosines and sines by position for rotary position embedding."""

from collections.abc import Sequence
from typing import Any

import torch

CHUNK = 4096  # positions at a time, to limit the memory of the float64 angles


def rope_table(inverse_frequencies: Sequence[float], magnitude: float, n_positions: int, device: Any) -> Any:
    """Return fp32 (n_positions, 2, pairs) on the device: cosine and sine of position x frequency, times magnitude.

    The angle is rounded to fp32, as in training; its cosine is computed in float64, so every device has the same table.
    """
    frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
    table = torch.empty(n_positions, 2, len(frequencies), device=device)
    for first in range(0, n_positions, CHUNK):
        end = min(first + CHUNK, n_positions)
        angles = (torch.arange(first, end, dtype=torch.float32)[:, None] * frequencies).double()
        waves = torch.stack([angles.cos(), angles.sin()], dim=1) * magnitude
        table[first:end] = waves.float().to(device)
    return table
