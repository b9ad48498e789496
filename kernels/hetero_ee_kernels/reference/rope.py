"""Rotary positions as in ../rope.py."""

from typing import Any

import torch


def rope(x: Any, positions: Any, table: Any, first: int, n_heads: int, head_dim: int) -> None:
    """x: fp32 (m, features), changed in place; positions: int32 (m,); table: rope_table's, fp32 (p, 2, n/2)."""
    half = table.shape[2]
    cosine, sine = table[positions.long()].unbind(1)  # (m, half) each
    heads = x[:, first : first + n_heads * head_dim].view(len(x), n_heads, head_dim)
    low, high = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half] = low * cosine[:, None] - high * sine[:, None]
    heads[..., half : 2 * half] = high * cosine[:, None] + low * sine[:, None]


def turned(heads: Any, positions: Any, table: Any) -> Any:
    """Heads (m, n_heads, head_dim) after the turn, as a new tensor."""
    flat = heads.reshape(len(heads), -1).clone()
    rope(flat, positions, table, 0, heads.shape[1], heads.shape[2])
    return torch.reshape(flat, heads.shape)
