"""Keys and values of the layers on a GPU: pages of one pool, allocated once: what fits at the start fits later."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.devices.cuda_errors import driver_errors
from hetero_ee.runtime.kv.layered import LayeredCache
from hetero_ee_kernels.pages import KINDS, PAGE_TOKENS, new_pages
from hetero_ee_kernels.reference import kv_write, read


@dataclass(slots=True)
class _Sequence:
    """slot: its line in the table; lengths: tokens each layer holds; pages: numbers of its pages, in order."""

    slot: int
    lengths: list[int]
    pages: list[int] = field(default_factory=list)


class GpuKvCache(LayeredCache[_Sequence]):
    """The interface of KvCache; what the kernels read is `pages` (hetero_ee_kernels.pages).

    shape: (n_layers, n_kv_heads, head_dim); max_tokens, layers: see LayeredCache; pool_tokens: of all sequences
    together, max_tokens where None; n_slots: sequences that may be open at once, UsageError for one more; kind:
    "fp16", "fp32" or "int8". Which pages and slots are free is never kept, only what sequences have: whatever ends a
    change halfway, none is lost and none has two owners.
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
        super().__init__(shape[0], max_tokens, layers)
        if kind not in KINDS:
            raise ValueError(f"no cache is called {kind}; there are {', '.join(KINDS)}.")
        self._kind = kind
        n_pages = _n_pages(max_tokens if pool_tokens is None else pool_tokens)
        self.pages = new_pages(shape, kind, n_pages, (n_slots, _n_pages(max_tokens)), device)

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        """See LayeredCache.cut; frees pages nothing lies in."""
        super().cut(sequence, length, layers)
        held = self._sequences[sequence]
        del held.pages[_n_pages(max(held.lengths, default=0)) :]

    def slots(self, batch: Batch) -> list[int]:
        """The table's line of each row."""
        return [self._sequences[sequence].slot for sequence in batch.sequences]

    def read(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values, fp32 (n_kv_heads, end - first, head_dim), of positions first..end-1."""
        keys, values = read(self.pages, self._sequences[sequence].slot, self._held.place(layer), first, end)
        return keys, values

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Keys and values (m, n_kv_heads, head_dim) of admitted rows, already turned to their positions."""
        device, width = self.pages.codes.device, keys[0].numel()
        both = torch.cat([keys.flatten(1), values.flatten(1)], 1).to(device)
        slots, positions = (torch.tensor(numbers, device=device) for numbers in (self.slots(batch), batch.positions))
        kv_write(both, self.pages, slots, positions, self._held.place(layer), 0, width)

    @property
    def n_bytes(self) -> int:
        """Of the whole pool and its table, however much of it is in use."""
        parts = (self.pages.codes, self.pages.scales, self.pages.table)
        return sum(part.nbytes for part in parts if part is not None)

    def check(self) -> None:
        """Raises HeteroError where lengths, pages and slots of a sequence contradict each other. Reads the table."""
        table = self.pages.table.tolist()
        owners = Counter(page for held in self._sequences.values() for page in held.pages)
        users = Counter(held.slot for held in self._sequences.values())
        for number, held in self._sequences.items():
            bounded = [self.max_tokens, *held.lengths, 0]
            whole = (
                len(held.lengths) == self.n_layers
                and bounded == sorted(bounded, reverse=True)
                and len(held.pages) >= _n_pages(bounded[1])
                and all(owners[page] == 1 and 0 <= page < self.pages.codes.shape[0] for page in held.pages)
                and users[held.slot] == 1
                and 0 <= held.slot < len(table)
                and table[held.slot][: len(held.pages)] == held.pages
            )
            if not whole:
                raise HeteroError(
                    f"the GPU's KV cache of sequence {number} is damaged: its layers hold {held.lengths} tokens, its "
                    f"pages are {held.pages} in slot {held.slot}."
                )

    def release(self) -> None:
        """Closes every sequence and gives the pool's memory back; nothing fits any more."""
        self._sequences.clear()
        shape = self.n_layers, self.pages.n_kv_heads, self.pages.head_dim
        self.pages = new_pages(shape, self._kind, 0, (0, 0), self.pages.codes.device)

    def _empty(self) -> _Sequence:
        slot = next(iter(self._free_slots()), None)
        if slot is None:
            raise UsageError(f"{len(self._sequences)} sequences are open, as many as the GPU's cache was made for.")
        return _Sequence(slot, [0] * self.n_layers)

    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """UsageError where the pool has no page left."""
        new = {number: max(0, _n_pages(n) - len(self._sequences[number].pages)) for number, n in lengths.items()}
        free = self._free_pages() if any(new.values()) else []
        if sum(new.values()) > len(free):
            n_tokens = self.pages.codes.shape[0] * PAGE_TOKENS
            raise UsageError(
                f"{sum(lengths.values())} tokens of {len(lengths)} sequences don't fit the GPU's cache of {n_tokens}; "
                "use fewer or shorter sequences, or put fewer layers on the GPU."
            )
        for number, n_new in new.items():
            self._grow(self._sequences[number], [free.pop() for _ in range(n_new)])

    def _grow(self, held: _Sequence, pages: list[int]) -> None:
        """Into the table first: a page that only the table knows is still free."""
        if not pages:
            return
        first = len(held.pages)
        with driver_errors("a new page", lambda: 0):
            self.pages.table[held.slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        held.pages += pages

    def _free_pages(self) -> list[int]:
        """The lowest last."""
        taken = {page for held in self._sequences.values() for page in held.pages}
        return [page for page in range(self.pages.codes.shape[0] - 1, -1, -1) if page not in taken]

    def _free_slots(self) -> list[int]:
        taken = {held.slot for held in self._sequences.values()}
        return [slot for slot in range(self.pages.table.shape[0]) if slot not in taken]


def _n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)
