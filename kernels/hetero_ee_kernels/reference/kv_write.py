"""Keys and values into the pages as in ../kv_write.py."""

from typing import Any

import torch

from hetero_ee_kernels.pages import PAGE_TOKENS, Pages
from hetero_ee_kernels.reference.rope import rope, turned

SMALLEST = 1e-30


def kv_write(
    x: Any,
    pages: Pages,
    slots: Any,
    positions: Any,
    layer: int,
    first_key: int,
    first_value: int,
    *,
    turns: Any = None,
) -> None:
    """x: fp32 (m, features), its queries (before first_key) turned in place where there is a table."""
    n_kv_heads, head_dim = pages.n_kv_heads, pages.head_dim
    width = n_kv_heads * head_dim
    keys, values = (x[:, at : at + width].reshape(-1, n_kv_heads, head_dim) for at in (first_key, first_value))
    if turns is not None:
        keys = turned(keys, positions, turns)
        rope(x, positions, turns, 0, first_key // head_dim, head_dim)
    page = pages.table[slots.long(), positions.long() // PAGE_TOKENS].long()
    within = positions.long() % PAGE_TOKENS
    for part, given in enumerate((keys, values)):
        codes = given
        if pages.scales is not None:
            codes, scales = _int8(given)
            pages.scales[page, layer, part, :, within] = scales
        pages.codes[page, layer, part, :, within] = codes.to(pages.codes.dtype)


def _int8(x: Any) -> tuple[Any, Any]:
    """Codes (m, heads, head_dim) and scales (m, heads)."""
    peak = x.abs().amax(-1)
    is_zero = peak < SMALLEST
    top = torch.full_like(peak, 127.0)  # torch multiplies by a rounded inverse where one side is a number
    inverse = torch.where(is_zero, torch.zeros_like(peak), top / peak)
    return (x * inverse[..., None]).round(), torch.where(is_zero, torch.zeros_like(peak), peak / top)
