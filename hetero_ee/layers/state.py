"""The state that a mixer keeps of each sequence: its bytes, and the time to read it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hetero_ee_profiles.hardware import DeviceTimes

KV_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}  # of one value
KV_SCALE_BYTES = {"fp32": 0, "fp16": 0, "int8": 4}  # of one position and head
MAX_DECODE_TOKENS = 16  # up to this many, attention reads keys and values once and pays a little for each more


class State(ABC):
    """A mixer's state of one sequence, kept by a cache. `kv_type` is the type of keys and values, a key of KV_BYTES."""

    @abstractmethod
    def n_bytes(self, n_tokens: int, kv_type: str) -> int:
        """Return the bytes after n_tokens tokens."""

    @abstractmethod
    def read_s(self, times: DeviceTimes, m: int, context_tokens: int, kv_type: str) -> float:
        """Return the seconds of reading it for m tokens, the last of a sequence of context_tokens."""

    @property
    def part_values(self) -> int:
        """Return the numbers that a GPU notes for a token and each part of its context before it sums the parts up."""
        return 0


@dataclass(frozen=True, slots=True)
class KvState(State):
    """One key and one value per token and key head, which later tokens read."""

    n_heads: int  # of queries
    n_kv_heads: int
    head_dim: int
    window: int | None  # positions that a token sees, its own included; None for all

    def n_bytes(self, n_tokens: int, kv_type: str) -> int:
        """Return the bytes after n_tokens tokens. A sliding window saves none: the cache keeps all."""
        return n_tokens * 2 * self.n_kv_heads * (self.head_dim * KV_BYTES[kv_type] + KV_SCALE_BYTES[kv_type])

    @property
    def part_values(self) -> int:
        return self.n_heads * (self.head_dim + 2)

    def positions_read(self, m: int, context_tokens: int) -> int:
        """Return the positions that m tokens read, each once, in a sequence of context_tokens including them."""
        seen = context_tokens if self.window is None else min(context_tokens, self.window + m - 1)
        return max(seen, m)

    def read_s(self, times: DeviceTimes, m: int, context_tokens: int, kv_type: str) -> float:
        """Return the seconds of attention, scaled if the profile timed another type of keys and values."""
        return times.attention_s(
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            m,
            self.positions_read(m, context_tokens),
            few=m <= MAX_DECODE_TOKENS,
            kept_share=self.n_bytes(1, kv_type) / self.n_bytes(1, times.kv_type),
        )
