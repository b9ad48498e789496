"""Attention of a few rows over texts in float64, for the kernels of any device, and defects that a test must notice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FIRST = 3  # the column where a row's queries begin
TOLERANCE = 3e-6  # of the largest value seen
BUGS = ("window", "own position", "groups", "tail", "factor", "a block's last", "a part twice", "order")
BLOCK_TOKENS, PART_TOKENS = 64, 256  # which the kernels add up one by one
Read = Callable[[int, int, int], tuple[Any, Any]]  # sequence, first, end -> keys and values, (n_kv_heads, n, head_dim)


@dataclass
class AttentionCase:
    """What a model's attention gets: arrays of numpy or torch."""

    kind: str
    n_kv_heads: int
    group: int
    head_dim: int
    window: int | None
    texts: list[Any]  # of each sequence: keys and values fp32 (length, 2 x n_kv_heads x head_dim)
    rows: list[tuple[int, int]]  # sequence, position
    queries: Any
    scale: float | None = None
    cap: float = 0.0
    sinks: Any = None  # fp32 (n_heads,): further scores without values

    @property
    def width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def largest(self) -> float:
        return max(float(abs(text).max()) for text in self.texts)

    def fits(self, found: Any, read: Read, bug: str = "", tolerance: float = TOLERANCE) -> bool:
        """Whether the output is as near as it must be to what follows from the cache's own (rounded) contents."""
        return bool(np.abs(float64(found) - self.expected(read, bug)).max() <= tolerance * self.largest)

    def expected(self, read: Read, bug: str = "") -> Any:
        """The output in float64, (n_rows, group x width)."""
        return np.stack([self._row(row, read, bug).ravel() for row in range(len(self.rows))])

    def _row(self, row: int, read: Read, bug: str) -> Any:
        sequence, position = self.rows[row]
        window = self.window and self.window + (bug == "window")
        first = max(0, position + 1 - window) if window else 0
        k, v = (float64(part) for part in read(sequence, first, position + (bug != "own position")))
        q = float64(self.queries[row])[FIRST : FIRST + self.group * self.width]
        q = q.reshape(self.n_kv_heads, self.group, self.head_dim)
        if bug == "groups":
            q = q.reshape(self.group, self.n_kv_heads, self.head_dim).swapaxes(0, 1)
        if bug == "tail":
            q = np.concatenate([q[..., :-1], 0 * q[..., -1:]], -1)
        scores = q @ k.swapaxes(1, 2) * (self.scale or (self.head_dim - (bug == "factor")) ** -0.5)
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        if self.sinks is not None and bug != "sinks":
            scores = np.concatenate([scores, float64(self.sinks).reshape(self.n_kv_heads, self.group, 1)], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        if bug == "a block's last":
            weights[..., BLOCK_TOKENS - 1] = 0
        if bug == "a part twice":
            weights[..., :PART_TOKENS] *= 2
        return (weights / weights.sum(-1, keepdims=True))[..., : k.shape[1]] @ (v[:, ::-1] if bug == "order" else v)


def float64(values: Any) -> Any:
    """The array, or a tensor of any device, as a float64 array."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values, np.float64)
