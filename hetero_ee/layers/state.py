"""Describe the state that a mixer keeps of each sequence: its size in bytes, and the time to read it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hetero_ee_profiles.hardware import DeviceTimes, mean_positions

KV_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}  # bytes of one value
KV_SCALE_BYTES = {"fp32": 0, "fp16": 0, "int8": 4}  # bytes of the scale of one position and head
FLOAT_BYTES = 4
MAX_DECODE_TOKENS = 16  # up to this many, attention reads keys and values once and pays a little for each more

LOG_TOKENS = MAX_DECODE_TOKENS + 8  # last tokens that a state can always forget: a verification and its next guess
MAX_PASS_TOKENS = 512  # tokens of a sequence in one pass, a prompt's chunk, unless a plan has larger ones
BLOCK_TOKENS = (
    64  # keys and values before a sliding window are dropped in blocks of this many, the size of a GPU's page
)


def kept_tokens(n_tokens: int, window: int | None, pass_tokens: int = 0, n_sequences: int = 1) -> int:
    """Return how many of n_tokens tokens, of all sequences together, a KV cache can hold: with a sliding window, those
    that a pass of each sequence may see.

    Args:
        pass_tokens: most tokens in one pass, if they are more than MAX_PASS_TOKENS.
    """
    if window is None:
        return n_tokens
    # Some layers may be a few tokens ahead.
    n_seen = window + LOG_TOKENS + MAX_DECODE_TOKENS + max(pass_tokens, MAX_PASS_TOKENS)
    return min(n_tokens, n_sequences * (n_seen // BLOCK_TOKENS + 2) * BLOCK_TOKENS)


class State(ABC):
    """A mixer's state of one sequence in a cache. `kv_type`, a key of KV_BYTES, is the type of keys and values."""

    source: int | None = None  # earlier layer whose state the mixer reads; None if it has its own

    @abstractmethod
    def n_bytes(self, n_tokens: int, kv_type: str, n_sequences: int = 1) -> int:
        """Return the bytes of the states of n_sequences sequences, which have n_tokens tokens together."""

    @abstractmethod
    def read_s(self, times: DeviceTimes, m: int, context_tokens: int, kv_type: str) -> float:
        """Return the seconds to read the state for m tokens, the last ones of a sequence of context_tokens."""

    @property
    def part_values(self) -> int:
        """Number of values per token and part of its context that a GPU stores before it combines the parts."""
        return 0

    def snapshot_bytes(self, n_tokens: int, kv_type: str) -> int:
        """Return the bytes of a copy that restores the state; 0 if it can be rolled back to any of n_tokens tokens."""
        return 0

    def pass_bytes(self, n_tokens: int, kv_type: str, pass_tokens: int, n_sequences: int = 1) -> int:
        """Return the bytes that passes of up to pass_tokens tokens add to n_bytes()."""
        return 0


@dataclass(frozen=True, slots=True)
class KvState(State):
    """Keys and values of one layer: one of each per token and key head, which later tokens read."""

    n_heads: int  # number of query heads
    n_kv_heads: int
    head_dim: int
    window: int | None  # positions that a token sees, its own included; None for all
    source: int | None = None
    shared_dim: int | None = None  # see AttentionSpec.shared_dim

    def n_bytes(self, n_tokens: int, kv_type: str, n_sequences: int = 1) -> int:
        n_kept = 0 if self.source is not None else kept_tokens(n_tokens, self.window, n_sequences=n_sequences)
        return n_kept * self.token_bytes(kv_type)

    def pass_bytes(self, n_tokens: int, kv_type: str, pass_tokens: int, n_sequences: int = 1) -> int:
        n_kept = kept_tokens(n_tokens, self.window, pass_tokens, n_sequences) if self.source is None else 0
        return n_kept * self.token_bytes(kv_type) - self.n_bytes(n_tokens, kv_type, n_sequences)

    def snapshot_bytes(self, n_tokens: int, kv_type: str) -> int:
        n_needed = 0 if self.window is None or self.source is not None else self.window + LOG_TOKENS + BLOCK_TOKENS
        return n_needed * self.token_bytes(kv_type) if n_needed < n_tokens else 0

    def token_bytes(self, kv_type: str) -> int:
        """Return the bytes of one token's keys and values, whichever layer keeps them."""
        n_stored = 2 if self.shared_dim is None else 1
        return n_stored * self.n_kv_heads * (self.head_dim * KV_BYTES[kv_type] + KV_SCALE_BYTES[kv_type])

    @property
    def part_values(self) -> int:
        return self.n_heads * ((self.shared_dim or self.head_dim) + 2)

    def positions_read(self, m: int, context_tokens: int) -> int:
        """Return how many distinct positions the last m tokens of a sequence of context_tokens read."""
        seen = context_tokens if self.window is None else min(context_tokens, self.window + m - 1)
        return max(seen, m)

    def mean_positions(self, m: int, context_tokens: int) -> float:
        """Return how many positions the last m tokens of a sequence of context_tokens see on average."""
        last = max(context_tokens, m)
        if self.window is None:
            return mean_positions(m, last)
        n_growing = min(max(0, self.window - last + m), m)  # tokens whose window reaches the sequence's start
        return (n_growing * (last - m + (n_growing + 1) / 2) + (m - n_growing) * self.window) / m

    def read_s(self, times: DeviceTimes, m: int, context_tokens: int, kv_type: str) -> float:
        """Estimate the seconds of attention in this layer for m tokens.

        A decode batch is charged for the positions it reads, a prompt chunk for the positions its tokens attend to.

        Args:
            kv_type: type of the cache. Times are scaled if the profile measured another type.
        """
        few = m <= MAX_DECODE_TOKENS
        positions = self.positions_read if few else self.mean_positions
        return times.attention_s(
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            m,
            positions(m, context_tokens),
            few=few,
            kept_share=self.token_bytes(kv_type) / self.token_bytes(times.kv_type),
        )


@dataclass(frozen=True, slots=True)
class RecurrentState(State):
    """State of a layer that reads each token once, such as a gated delta layer. It does not grow with the context.

    It consists of a matrix per value head, the log of the last tokens' updates of the matrices, from which they can be
    taken back, and the last inputs of a convolution. All are fp32, whatever the type of keys and values.
    """

    n_key_heads: int
    n_value_heads: int  # also the number of matrices; 0 for a layer with only a convolution
    key_dim: int
    value_dim: int
    n_channels: int  # of the convolution
    kernel: int  # tokens that the convolution sees

    @property
    def n_inputs(self) -> int:
        """Number of tokens whose inputs of the convolution are kept."""
        return LOG_TOKENS + self.kernel - 1

    @property
    def matrix_bytes(self) -> int:
        return FLOAT_BYTES * self.n_value_heads * self.key_dim * self.value_dim

    def snapshot_bytes(self, n_tokens: int, kv_type: str) -> int:
        return self.n_bytes(n_tokens, kv_type)

    def n_bytes(self, n_tokens: int, kv_type: str, n_sequences: int = 1) -> int:
        update = self.n_key_heads * self.key_dim + self.n_value_heads * (self.value_dim + 1)
        logged = LOG_TOKENS * update + self.n_inputs * self.n_channels
        return n_sequences * (self.matrix_bytes + FLOAT_BYTES * logged)

    def read_s(self, times: DeviceTimes, m: int, context_tokens: int, kv_type: str) -> float:
        """Estimate the seconds to read the matrices once, and to write them once in LOG_TOKENS tokens."""
        return self.matrix_bytes * (1 + min(1.0, m / LOG_TOKENS)) / times.read_bytes_per_s.value
