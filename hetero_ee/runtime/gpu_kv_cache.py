"""Keys and values of the layers on a GPU: pages of one pool, allocated once: what fits at the start fits later."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import UsageError
from hetero_ee.runtime.rows import Rows
from hetero_ee_kernels.pages import PAGE_TOKENS, new_pages
from hetero_ee_kernels.reference.attention import read


@dataclass(slots=True)
class _Sequence:
    """slot: its line in the table; pages: numbers of its pages, in order; length: tokens it holds."""

    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class GpuKvCache:
    """The interface of KvCache; what the kernels read is `pages` (hetero_ee_kernels.pages).

    shape: (n_layers, n_kv_heads, head_dim); max_tokens: positions a sequence may have; pool_tokens: of all sequences
    together, max_tokens where None; n_slots: sequences that may be open at once; kind: "fp16", "fp32" or "int8".
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
    ) -> None:
        self.max_tokens = max_tokens
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
        self._sequences[sequence] = _Sequence(self._free_slots.pop())

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
        """Tokens the sequence holds."""
        return self._sequences[sequence].length

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets every position from `length` on, and frees its pages. Raises ValueError where it holds fewer."""
        held = self._sequences[sequence]
        if not 0 <= length <= held.length:
            raise ValueError(f"sequence {sequence} holds {held.length} tokens, it can't be cut to {length}.")
        held.length, n_kept = length, _n_pages(length)
        self._free_pages += reversed(held.pages[n_kept:])
        del held.pages[n_kept:]

    def admit(self, rows: Rows) -> None:
        """Makes room for the rows in every layer, once a pass.

        Raises ValueError, and admits none, unless each follows the last token of an open sequence; UsageError likewise
        where the pool has no page left.
        """
        lengths = rows.lengths_after({number: held.length for number, held in self._sequences.items()}, self.max_tokens)
        new = {number: _n_pages(n) - len(self._sequences[number].pages) for number, n in lengths.items()}
        if sum(new.values()) > len(self._free_pages):
            n_tokens = self.pages.codes.shape[0] * PAGE_TOKENS
            raise UsageError(
                f"{sum(lengths.values())} tokens of {len(lengths)} sequences don't fit the GPU's cache of {n_tokens}; "
                "use fewer or shorter sequences, or put fewer layers on the GPU."
            )
        for number, length in lengths.items():
            self._grow(self._sequences[number], new[number])
            self._sequences[number].length = length

    def slots(self, rows: Rows) -> list[int]:
        """The table's line of each row."""
        return [self._sequences[sequence].slot for sequence in rows.sequences]

    def read(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values, fp32 (n_kv_heads, end - first, head_dim), of positions first..end-1."""
        keys, values = read(self.pages, self._sequences[sequence].slot, layer, first, end)
        return keys, values

    @property
    def n_bytes(self) -> int:
        """Of the whole pool and its table, however much of it is in use."""
        parts = (self.pages.codes, self.pages.scales, self.pages.table)
        return sum(part.nbytes for part in parts if part is not None)

    def _grow(self, held: _Sequence, n_new: int) -> None:
        if n_new <= 0:
            return
        added = [self._free_pages.pop() for _ in range(n_new)]
        first = len(held.pages)
        held.pages += added
        self.pages.table[held.slot, first : first + n_new] = torch.tensor(added, dtype=torch.int32)


def _n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)
