"""KV cache of the layers on a GPU: a pool of pages, allocated once, so that what fits at the start fits later."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hetero_ee.device_errors import driver_errors
from hetero_ee.errors import HeteroError, UsageError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.windowed import WindowedCache
from hetero_ee.layers.state import kept_tokens
from hetero_ee_kernels.pages import KINDS, PAGE_TOKENS, new_pages

DROPPED = -1  # in a sequence's list of pages: one that a sliding window has passed
VISITOR = 0  # number of the only sequence of a VisitingCache


@dataclass(slots=True)
class _Sequence:
    slot: int  # its row in the page table
    lengths: list[int]  # tokens that each layer holds
    pages: list[int] = field(default_factory=list)  # their numbers, in order, or DROPPED
    first: int = 0  # first position that is stored


class GpuKvCache(WindowedCache[_Sequence]):
    """The KV cache of a GPU: a pool of pages (hetero_ee_kernels.pages), which the kernels read.

    Records only the pages and slots that sequences own, never the free ones. So an interrupted change cannot lose a
    page or give it two owners.

    Args:
        shape: (n_layers, n_kv_heads, head_dim), then 1 if values are features of the keys.
        max_tokens, layers: see LayeredCache.
        pool_tokens: capacity for all sequences together; None for max_tokens.
        window: see WindowedCache. Pages before it become free. If the sequences need more pages, the tensors are
            replaced by larger ones and `version` changes, as in GpuRecurrentCache.
        n_slots: sequences that may be open at once; one more raises UsageError.
        kind: "fp16", "fp32" or "int8".
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        max_tokens: int,
        device: Any,
        *,
        pool_tokens: int | None = None,
        n_slots: int = 16,
        kind: str,
        layers: Sequence[int] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(shape[0], max_tokens, layers)
        if kind not in KINDS:
            raise ValueError(f"no cache is called {kind}; there are {', '.join(KINDS)}.")
        self.kind, self.window, self.version = kind, window, 0
        n_pages = _n_pages(max_tokens if pool_tokens is None else pool_tokens)
        self.pages = new_pages(shape, kind, n_pages, (n_slots, _n_pages(max_tokens)), device)

    @property
    def device(self) -> Any:
        return self.pages.codes.device

    @property
    def n_parts(self) -> int:
        """Number of parts into which attention divides the longest sequence."""
        return self.pages.n_parts

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        """See KvCache.cut. Pages without tokens become free."""
        super().cut(sequence, length, layers)
        held = self._sequences[sequence]
        del held.pages[_n_pages(max(held.lengths, default=0)) :]

    def _begin_at(self, sequence: int, first: int, length: int) -> None:
        held = self._sequences[sequence]
        held.first, held.pages = first, [DROPPED] * (first // PAGE_TOKENS)
        self._make_room({sequence: length})

    def _drop(self, held: _Sequence) -> None:
        """Free the pages that no token of the next pass needs. They count as dropped before they are free."""
        for page in range(held.first // PAGE_TOKENS, self.first_needed(min(held.lengths, default=0)) // PAGE_TOKENS):
            held.first = (page + 1) * PAGE_TOKENS
            held.pages[page] = DROPPED

    def slots(self, batch: Batch) -> list[int]:
        """Return, for each token, its sequence's row in the page table."""
        return [self._sequences[sequence].slot for sequence in batch.sequences]

    def stored(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, ...]:
        """See LayeredCache. Returns copies on the GPU, in the CPU's format."""
        at = self._pages_and_lines(sequence, first, end)
        return tuple(part[at].transpose(0, 1) for part in self._parts(layer))

    def store(self, layer: int, sequence: int, first: int, parts: Sequence[Tensor]) -> None:
        """See LayeredCache. Returns after the copies to the GPU are complete."""
        at = self._pages_and_lines(sequence, first, first + parts[0].shape[1])
        for ours, theirs in zip(self._parts(layer), parts, strict=True):
            ours[at] = theirs.transpose(0, 1).to(ours.device)

    def _copy_slots(self, sequence: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        pages = self._sequences[sequence].pages
        places = [[pages[at // PAGE_TOKENS] for at in slots] for slots in (sources, targets)]
        lines = [[at % PAGE_TOKENS for at in slots] for slots in (sources, targets)]
        for part in (self.pages.codes, self.pages.scales):
            if part is not None:
                part[places[1], :, :, :, lines[1]] = part[places[0], :, :, :, lines[0]]

    def _parts(self, layer: int) -> list[Tensor]:
        """Return keys, values, and int8's scales, in CpuKvCache's order: (n_pages, 64, n_kv_heads[, head_dim])."""
        index, every = self.index(layer), (self.pages.codes, self.pages.scales)
        return [part for all_layers in every if all_layers is not None for part in _by_position(all_layers, index)]

    def _pages_and_lines(self, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the page of each position from `first` to `end` - 1, and its index within that page."""
        held, positions = self._sequences[sequence], torch.arange(first, end, device=self.pages.codes.device)
        if first < held.first:
            raise ValueError(f"position {first} of sequence {sequence} has been dropped, {held.first} has not.")
        table = self.pages.table[held.slot]
        return table[positions // PAGE_TOKENS].long(), positions % PAGE_TOKENS

    def _places(self, batch: Batch) -> Tensor:
        """Return each token's page and its index within that page: (2, m)."""
        places = [
            (self._sequences[sequence].pages[at // PAGE_TOKENS], at % PAGE_TOKENS)
            for _, sequence, at in batch.entries()
        ]
        device = self.pages.codes.device
        return torch.tensor(places, pin_memory=device.type == "cuda").to(device, non_blocking=True).T

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole pool and the page table, used or not."""
        parts = (self.pages.codes, self.pages.scales, self.pages.table)
        return sum(part.nbytes for part in parts if part is not None)

    def check(self) -> None:
        """See KvCache.check. Copies the page table from the GPU."""
        table = self.pages.table.tolist()
        owners = Counter(page for held in self._sequences.values() for page in held.pages)
        users = Counter(held.slot for held in self._sequences.values())
        for number, held in self._sequences.items():
            bounded, first = [self.max_tokens, *held.lengths, 0], held.first // PAGE_TOKENS
            stored = held.pages[first:]
            whole = (
                len(held.lengths) == self.n_layers
                and bounded == sorted(bounded, reverse=True)
                and len(held.pages) >= _n_pages(bounded[1])
                and all(owners[page] == 1 and 0 <= page < self.pages.codes.shape[0] for page in stored)
                and users[held.slot] == 1
                and 0 <= held.slot < len(table)
                and table[held.slot][first : len(held.pages)] == stored
            )
            if not whole:
                raise HeteroError(
                    f"the GPU's KV cache of sequence {number} is damaged: its layers hold {held.lengths} tokens, its "
                    f"pages are {held.pages} in slot {held.slot}."
                )

    def release(self) -> None:
        """Close every sequence and free the pool. The cache can't hold tokens afterwards."""
        self._sequences.clear()
        self.pages = new_pages(self.pages.shape, self.kind, 0, (0, 0), self.pages.codes.device)

    def _empty(self) -> _Sequence:
        slot = next(iter(self._free_slots()), None)
        if slot is None:
            raise UsageError(f"{len(self._sequences)} sequences are open, the maximum of the GPU's KV cache.")
        return _Sequence(slot, [0] * self.n_layers)

    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """See LayeredCache. Raises: UsageError: if the pool has too few free pages."""
        for number in lengths:
            self._drop(self._sequences[number])
        new = {number: max(0, _n_pages(n) - len(self._sequences[number].pages)) for number, n in lengths.items()}
        free = self._free_pages() if any(new.values()) else []
        if sum(new.values()) > len(free) and self.window is not None:
            self._enlarge(sum(new.values()) - len(free))
            free = self._free_pages()
        if sum(new.values()) > len(free):
            n_tokens = self.pages.codes.shape[0] * PAGE_TOKENS
            raise UsageError(
                f"{sum(lengths.values())} tokens of {len(lengths)} sequences don't fit the GPU's cache of {n_tokens}; "
                "use fewer or shorter sequences, or put fewer layers on the GPU."
            )
        for number, n_new in new.items():
            self._grow(self._sequences[number], [free.pop() for _ in range(n_new)])

    def _enlarge(self, n_missing: int) -> None:
        """Enlarge a pool for windows, which is allocated for some sequences, if max_tokens tokens would not fit it.

        Raises: DeviceMemoryError: if memory runs out.
        """
        n_pages, present = len(self.pages.codes), self.pages
        larger = min(
            _n_pages(self.max_tokens), n_pages + max(n_missing, _n_pages(kept_tokens(self.max_tokens, self.window)))
        )
        if larger <= n_pages:
            return
        with driver_errors("the keys and values of more sequences", lambda: 0):
            found = new_pages(present.shape, self.kind, larger, (0, 0), self.device)
            for new, old in ((found.codes, present.codes), (found.scales, present.scales)):
                if old is not None:
                    new[:n_pages].copy_(old)
        self.pages, self.version = replace(found, table=present.table), self.version + 1

    def _grow(self, held: _Sequence, pages: list[int]) -> None:
        """Assign free pages to a sequence.

        Writes the page table first: if that fails, no sequence owns the pages, so they stay free.
        """
        if not pages:
            return
        first = len(held.pages)
        with driver_errors("a new page", lambda: 0):
            self.pages.table[held.slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        held.pages += pages

    def _free_pages(self) -> list[int]:
        """Return the numbers of the free pages, in descending order."""
        taken = {page for held in self._sequences.values() for page in held.pages}
        return [page for page in range(self.pages.codes.shape[0] - 1, -1, -1) if page not in taken]

    def _free_slots(self) -> list[int]:
        taken = {held.slot for held in self._sequences.values()}
        return [slot for slot in range(self.pages.table.shape[0]) if slot not in taken]


class VisitingCache(GpuKvCache):
    """GPU copy of one layer's keys and values of one sequence, for an attention whose KV cache is on the CPU.

    Keys and values are uploaded and copied back in the CPU's format. The host waits for every copy.

    Args:
        shape: a KvShape.
        pass_tokens: see kept_tokens().
    """

    def __init__(
        self,
        shape: tuple[int, int, int | None, int | None],
        max_tokens: int,
        kind: str,
        device: Any,
        pass_tokens: int = 0,
    ) -> None:
        *heads, window, shared_dim = shape
        pages, pool_tokens = (1, *heads, 2 if shared_dim is None else 1), kept_tokens(max_tokens, window, pass_tokens)
        super().__init__(pages, max_tokens, device, pool_tokens=pool_tokens, n_slots=1, kind=kind, window=window)

    def index(self, layer: int) -> int:
        """Return 0, since the cache has one layer."""
        return 0

    def bring(self, owner: CpuKvCache, layer: int, sequence: int, n_known: int, n_rows: int) -> Batch:
        """Upload what the next n_rows tokens see of n_known tokens in `owner`. Return a batch of their positions."""
        self.close(VISITOR)
        self.open(VISITOR)
        first = self.first_needed(n_known)
        self.adopt(VISITOR, first, n_known + n_rows)
        seen = 0 if self.window is None else max(0, n_known + 1 - self.window)
        if seen < n_known:
            self.store(layer, VISITOR, seen, owner.stored(layer, sequence, seen, n_known))
        return Batch.of_sequence(VISITOR, n_known, [0] * n_rows)

    def take_back(self, owner: CpuKvCache, layer: int, sequence: int, first: int, end: int) -> None:
        """Copy positions first..end-1, written since the upload, to the layer in `owner`."""
        owner.store(layer, sequence, first, self.stored(layer, VISITOR, first, end))


def _by_position(part: Tensor, index: int) -> tuple[Tensor, ...]:
    return part[:, index].transpose(2, 3).unbind(1)


def _n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)
