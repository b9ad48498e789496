"""Keys and values of every layer and sequence, by absolute position, fp32."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.runtime.rows import Rows

PAGE_TOKENS = 256  # a sequence's first room; it doubles from there, so that copying stays cheap


@dataclass(slots=True)
class _Sequence:
    """Room of one sequence: keys and values (n_layers, n_kv_heads, capacity, head_dim); length: tokens it holds;
    view: what a user of the storage has made of it, see KvCache.view."""

    keys: Tensor
    values: Tensor
    length: int = 0
    view: Any = None


@dataclass(slots=True)
class KvCache:
    """max_tokens: positions a sequence may have. Sequences are opened, extended, truncated and closed by number."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    max_tokens: int
    _sequences: dict[int, _Sequence] = field(default_factory=dict)

    def open(self, sequence: int) -> None:
        """Starts an empty sequence. Raises ValueError where it is open."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already.")
        empty = torch.zeros(self.n_layers, self.n_kv_heads, 0, self.head_dim)
        self._sequences[sequence] = _Sequence(empty, empty.clone())

    def open_new(self) -> int:
        """Starts an empty sequence under the lowest free number, which it returns."""
        number = next(number for number in range(len(self._sequences) + 1) if number not in self._sequences)
        self.open(number)
        return number

    def close(self, sequence: int) -> None:
        """Frees the sequence's memory; closing an unknown one does nothing."""
        self._sequences.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """Tokens the sequence holds."""
        return self._sequences[sequence].length

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets every position from `length` on. Raises ValueError where it holds fewer."""
        held = self._sequences[sequence]
        if not 0 <= length <= held.length:
            raise ValueError(f"sequence {sequence} holds {held.length} tokens, it can't be cut to {length}.")
        held.length = length

    def admit(self, rows: Rows) -> None:
        """Makes room for the rows in every layer, once a pass.

        Raises ValueError, and admits none, unless each follows the last token of an open sequence.
        """
        lengths = rows.lengths_after({number: held.length for number, held in self._sequences.items()}, self.max_tokens)
        for sequence, length in lengths.items():
            self._grow(sequence, length)
            self._sequences[sequence].length = length

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Keys and values (m, n_kv_heads, head_dim) of admitted rows."""
        for row, sequence, position in rows.places():
            held = self._sequences[sequence]
            held.keys[layer, :, position] = keys[row]
            held.values[layer, :, position] = values[row]

    def read(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (n_kv_heads, end - first, head_dim) of positions first..end-1; valid until the next admit."""
        held = self._sequences[sequence]
        return held.keys[layer, :, first:end], held.values[layer, :, first:end]

    def view(self, sequence: int, make: Callable[[Tensor, Tensor], Any]) -> Any:
        """make(keys, values) of the sequence's whole storage, (n_layers, n_kv_heads, capacity, head_dim) each.

        Made once and kept until the sequence grows or closes.
        """
        held = self._sequences[sequence]
        if held.view is None:
            held.view = make(held.keys, held.values)
        return held.view

    @property
    def n_bytes(self) -> int:
        return sum(held.keys.nbytes + held.values.nbytes for held in self._sequences.values())

    def _grow(self, sequence: int, length: int) -> None:
        """In one step, so that a Ctrl-C in here can't leave keys, values and view of different sizes."""
        held = self._sequences[sequence]
        capacity = held.keys.shape[2]
        if length <= capacity:
            return
        room = min(self.max_tokens, max(2 * capacity, -(-length // PAGE_TOKENS) * PAGE_TOKENS))
        shape = (self.n_layers, self.n_kv_heads, room, self.head_dim)
        # NumPy asks the system for huge pages, torch does not: decoding the demo model behind 1,024 tokens 850 tokens/s
        # on one thread, 700 without (Zen 5, 2026-11-21).
        keys, values = (torch.from_numpy(np.zeros(shape, np.float32)) for _ in range(2))
        keys[:, :, :capacity], values[:, :, :capacity] = held.keys, held.values
        self._sequences[sequence] = _Sequence(keys, values, held.length)
