"""Logits of candidate tokens as in ../sliced_head.py, out of the whole product."""

from typing import Any

import torch

from hetero_ee_kernels.reference import matmul
from hetero_ee_kernels.tile_matrix import TileMatrix


def sliced_head(x: Any, weight: TileMatrix, ids: Any, out: Any = None) -> Any:
    """x: fp32 or fp16 (m, K), quantized to int8; ids: int64 (c,) or (m, c) -> fp32 (m, c); NaN for an unknown id."""
    return _chosen(matmul.matmul(x, weight), ids, out)


def float_sliced_head(x: Any, weight: TileMatrix, ids: Any, out: Any = None) -> Any:
    """The same with x as it is."""
    return _chosen(matmul.float_matmul(x, weight), ids, out)


def _chosen(logits: Any, ids: Any, out: Any) -> Any:
    ids = ids.expand(len(logits), ids.shape[-1])
    known = (ids >= 0) & (ids < logits.shape[1])
    chosen = torch.where(known, logits.gather(1, torch.where(known, ids, 0)), torch.nan)
    return chosen if out is None else out.copy_(chosen)
