"""Batch of a matrix in tiles as in ../embed.py."""

from typing import Any

import torch

from hetero_ee_kernels.reference.tile_matrix import dequantize
from hetero_ee_kernels.tile_matrix import TileMatrix


def embed(weight: TileMatrix, n_columns: int, ids: Any, out: Any = None) -> Any:
    """ids: int64 (m,) -> fp32 (m, n_columns); NaN for an id that has no row."""
    known = (ids >= 0) & (ids < weight.n_rows)
    rows = dequantize(weight)[torch.where(known, ids, 0), :n_columns]
    rows = torch.where(known[:, None], rows, torch.nan)
    return rows if out is None else out.copy_(rows)
