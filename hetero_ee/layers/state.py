"""The state that a mixer keeps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvState:
    """One key and one value per token and key head, which later tokens read."""

    n_heads: int  # of queries
    n_kv_heads: int
    head_dim: int
    window: int | None  # positions that a token sees, its own included; None for all
