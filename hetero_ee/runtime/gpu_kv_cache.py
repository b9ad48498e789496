"""Keys and values of the layers on a GPU: pages of one pool, allocated once: what fits at the start fits later."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.runtime.held_layers import HeldLayers, lengths_with
from hetero_ee.runtime.rows import Rows
from hetero_ee_kernels.pages import PAGE_TOKENS, new_pages
from hetero_ee_kernels.reference.attention import read


@dataclass(slots=True)
class _Sequence:
    """slot: its line in the table; lengths: tokens each layer holds; pages: numbers of its pages, in order."""

    slot: int
    lengths: list[int]
    pages: list[int] = field(default_factory=list)


class GpuKvCache:
    """The interface of KvCache; what the kernels read is `pages` (hetero_ee_kernels.pages).

    shape: (n_layers, n_kv_heads, head_dim); layers: which of the model's, the first n_layers where None. max_tokens:
    positions a sequence may have; pool_tokens: of all sequences together, max_tokens where None; n_slots: sequences
    that may be open at once; kind: "fp16", "fp32" or "int8".
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        max_tokens: int,
        device: Any,
        *,
        pool_tokens: int | None = None,
        n_slots: int = 16,
        kind: str = "fp16",
        layers: Sequence[int] | None = None,
    ) -> None:
        self.max_tokens, self.n_layers = max_tokens, shape[0]
        self._held = HeldLayers(range(shape[0]) if layers is None else layers)
        n_pages = _n_pages(max_tokens if pool_tokens is None else pool_tokens)
        self.pages = new_pages(shape, kind, n_pages, (n_slots, _n_pages(max_tokens)), device)
        self._free_pages = list(range(n_pages - 1, -1, -1))
        self._free_slots = list(range(n_slots - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}

    def open(self, sequence: int) -> None:
        """Starts an empty sequence. Raises ValueError where it is open, UsageError where no slot is free."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already.")
        if not self._free_slots:
            raise UsageError(f"{len(self._sequences)} sequences are open, as many as the GPU's cache was made for.")
        self._sequences[sequence] = _Sequence(self._free_slots.pop(), [0] * self.n_layers)

    def open_new(self) -> int:
        """Starts an empty sequence under the lowest free number, which it returns."""
        number = next(number for number in range(len(self._sequences) + 1) if number not in self._sequences)
        self.open(number)
        return number

    def close(self, sequence: int) -> None:
        """Frees the sequence's pages; closing an unknown one does nothing."""
        held = self._sequences.pop(sequence, None)
        if held is not None:
            self._free_pages += reversed(held.pages)
            self._free_slots.append(held.slot)

    def length(self, sequence: int) -> int:
        """Tokens of the sequence that have passed every layer."""
        return min(self._sequences[sequence].lengths)

    def length_at(self, sequence: int, layer: int) -> int:
        """See KvCache.length_at."""
        return self._sequences[sequence].lengths[self._held.place(layer)]

    def place(self, layer: int) -> int:
        """See KvCache.place."""
        return self._held.place(layer)

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets every position from `length` on in each layer, and frees their pages.

        Raises ValueError where no layer holds so many.
        """
        held = self._sequences[sequence]
        longest = max(held.lengths)
        if not 0 <= length <= longest:
            raise ValueError(f"sequence {sequence} holds {longest} tokens, it can't be cut to {length}.")
        held.lengths, n_kept = [min(length, each) for each in held.lengths], _n_pages(length)
        self._free_pages += reversed(held.pages[n_kept:])
        del held.pages[n_kept:]

    def admit(self, rows: Rows, layers: range | None = None) -> None:
        """Makes room for the rows in these layers, None for all, once a pass.

        Raises ValueError, and admits none, unless each follows the last token that the layers hold of its sequence;
        UsageError likewise where the pool has no page left.
        """
        places = self._held.places(layers)
        if places.start == places.stop:
            return
        held = {number: each.lengths for number, each in self._sequences.items()}
        lengths = lengths_with(rows, held, places, self.max_tokens)
        new = {number: max(0, _n_pages(n) - len(self._sequences[number].pages)) for number, n in lengths.items()}
        if sum(new.values()) > len(self._free_pages):
            n_tokens = self.pages.codes.shape[0] * PAGE_TOKENS
            raise UsageError(
                f"{sum(lengths.values())} tokens of {len(lengths)} sequences don't fit the GPU's cache of {n_tokens}; "
                "use fewer or shorter sequences, or put fewer layers on the GPU."
            )
        for number, length in lengths.items():
            self._grow(self._sequences[number], new[number])
            self._sequences[number].lengths[places] = [length] * (places.stop - places.start)

    def slots(self, rows: Rows) -> list[int]:
        """The table's line of each row."""
        return [self._sequences[sequence].slot for sequence in rows.sequences]

    def read(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values, fp32 (n_kv_heads, end - first, head_dim), of positions first..end-1."""
        keys, values = read(self.pages, self._sequences[sequence].slot, self._held.place(layer), first, end)
        return keys, values

    @property
    def n_bytes(self) -> int:
        """Of the whole pool and its table, however much of it is in use."""
        parts = (self.pages.codes, self.pages.scales, self.pages.table)
        return sum(part.nbytes for part in parts if part is not None)

    def check(self) -> None:
        """Raises HeteroError where lengths, pages and slots contradict each other."""
        pages = [page for held in self._sequences.values() for page in held.pages] + self._free_pages
        slots = [held.slot for held in self._sequences.values()] + self._free_slots
        whole = sorted(pages) == list(range(len(pages))) and sorted(slots) == list(range(len(slots)))
        for number, held in self._sequences.items():
            falling = held.lengths == sorted(held.lengths, reverse=True)
            if not whole or not falling or len(held.pages) < _n_pages(held.lengths[0]):
                raise HeteroError(f"the GPU's KV cache of sequence {number} is damaged: lengths {held.lengths}.")

    def _grow(self, held: _Sequence, n_new: int) -> None:
        if n_new == 0:
            return
        added = [self._free_pages.pop() for _ in range(n_new)]
        first = len(held.pages)
        held.pages += added
        self.pages.table[held.slot, first : first + n_new] = torch.tensor(added, dtype=torch.int32)


def _n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)
