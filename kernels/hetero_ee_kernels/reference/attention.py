"""Attention against the pages as in ../attention.py, one row and its whole softmax at a time."""

from math import sqrt
from typing import Any

import torch

from hetero_ee_kernels.pages import PAGE_TOKENS, Pages


def attention(
    queries: Any,
    pages: Pages,
    slots: Any,
    positions: Any,
    layer: int,
    window: int | None,
    out: Any,
    *,
    first: int = 0,
    workspace: Any = None,
) -> Any:
    """queries: fp32 (m, features), heads from feature `first` on; out: (m, n_heads x head_dim). Returns out."""
    n_kv_heads, head_dim = pages.n_kv_heads, pages.head_dim
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        low = 0 if window is None else max(0, position + 1 - window)
        keys, values = read(pages, slot, layer, low, position + 1)
        grouped = queries[row, first : first + out.shape[1]].reshape(n_kv_heads, -1, head_dim)
        scores = torch.bmm(grouped, keys.transpose(1, 2)) / sqrt(head_dim)
        out[row] = torch.bmm(torch.softmax(scores, -1), values).flatten()
    return out


def read(pages: Pages, slot: int, layer: int, first: int, end: int) -> tuple[Any, Any]:
    """Keys and values fp32 (n_kv_heads, end - first, head_dim) of positions first..end-1."""
    places = torch.arange(first, end, device=pages.codes.device)
    page = pages.table[slot, places // PAGE_TOKENS].long()
    codes = pages.codes[page, layer, :, :, places % PAGE_TOKENS].float()  # (positions, 2, heads, features)
    if pages.scales is not None:
        codes = codes * pages.scales[page, layer, :, :, places % PAGE_TOKENS][..., None]
    keys, values = codes.permute(1, 2, 0, 3).unbind(0)
    return keys.contiguous(), values.contiguous()
