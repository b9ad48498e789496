"""KV cache in the CPU's memory: fp32, fp16, or int8 with a scale per position and head."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.errors import HeteroError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.windowed import WindowedCache
from hetero_ee.layers.state import kept_tokens

PAGE_TOKENS = 256  # a sequence's first capacity; it doubles from there, so that copying stays cheap
KINDS = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
LARGEST = 65504.0  # fp16's largest number: larger ones are stored as this, as in the kernels
SMALLEST = 1e-30  # a head with only smaller values is stored as zero, as in the kernels


@dataclass(slots=True)
class _Sequence:
    """Storage of one sequence.

    parts: keys, unless shared values (n_layers, n_kv_heads, capacity, head_dim), then for int8 their scales (n_layers,
    n_kv_heads, capacity).
    """

    parts: tuple[Tensor, ...]
    lengths: list[int]  # tokens that each layer holds
    first: int = 0  # position of index 0: earlier ones have been dropped
    view: Any = None  # result of CpuKvCache.view


class CpuKvCache(WindowedCache[_Sequence]):
    """KV cache in the CPU's memory, which grows with the sequences. `kind` is "fp32", "fp16" or "int8".

    See LayeredCache for `max_tokens` and `layers`, WindowedCache for `window`, AttentionSpec for `shared_dim`. With a
    window, a sequence's keys and values move to the front of its storage when they reach the end.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_tokens: int,
        layers: Sequence[int] | None = None,
        *,
        kind: str,
        window: int | None = None,
        shared_dim: int | None = None,
    ) -> None:
        super().__init__(n_layers, max_tokens, layers)
        if kind not in KINDS:
            raise ValueError(f"no cache is called {kind}; there are {', '.join(KINDS)}.")
        self.n_kv_heads, self.head_dim, self.kind, self.window = n_kv_heads, head_dim, kind, window
        self.value_dim, self._n_stored = shared_dim or head_dim, 2 if shared_dim is None else 1

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (m, n_kv_heads, head_dim) of admitted tokens."""
        index = self.index(layer)
        for row, sequence, slot in batch.entries():
            found = [part[row] for part in (keys, values)[: self._n_stored]]
            if self.kind == "fp16":
                found = [part.clamp(-LARGEST, LARGEST) for part in found]
            elif self.kind == "int8":
                found = [part for parts in zip(*map(_int8, found), strict=True) for part in parts]
            held = self._sequences[sequence]
            for part, x in zip(held.parts, found, strict=True):
                part[index, :, slot - held.first] = x

    def read(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of positions first..end-1 as fp32 (n_kv_heads, end - first, head_dim or value_dim).

        They are valid until the next admit().
        """
        parts = self.stored(layer, sequence, first, end)
        found = [part.float() for part in parts[: self._n_stored]]
        if len(parts) > self._n_stored:
            found = [codes * scales[..., None] for codes, scales in zip(found, parts[self._n_stored :], strict=True)]
        return found[0], found[-1][..., self.head_dim - self.value_dim :]

    def stored(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, ...]:
        """See LayeredCache. Returns writable views instead of copies."""
        index, held = self.index(layer), self._sequences[sequence]
        if first < held.first:
            raise ValueError(f"position {first} of sequence {sequence} has been dropped, {held.first} has not.")
        return tuple(part[index, :, first - held.first : end - held.first] for part in held.parts)

    def store(self, layer: int, sequence: int, first: int, parts: Sequence[Tensor]) -> None:
        """See LayeredCache."""
        for ours, theirs in zip(self.stored(layer, sequence, first, first + parts[0].shape[1]), parts, strict=True):
            ours.copy_(theirs)

    def _copy_slots(self, sequence: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        held = self._sequences[sequence]
        for part in held.parts:
            stored, first = part.numpy(), held.first
            stored[:, :, [at - first for at in targets]] = stored[:, :, [at - first for at in sources]]

    def view(self, sequence: int, make: Callable[..., Any]) -> Any:
        """Return make(first, *parts), called with the sequence's whole storage, which begins at position `first`.

        The parts are keys, values, which may be the keys, and for int8 their scales. The result is reused until the
        storage changes.
        """
        held = self._sequences[sequence]
        if held.view is None:
            n_times = 2 // self._n_stored
            held.view = make(held.first, *(part for part in held.parts for _ in range(n_times)))
        return held.view

    @property
    def n_bytes(self) -> int:
        return sum(part.nbytes for held in self._sequences.values() for part in held.parts)

    def check(self) -> None:
        owners = Counter(part.data_ptr() for held in self._sequences.values() for part in held.parts)
        for number, held in self._sequences.items():
            if not self._is_whole(held) or any(part.nbytes and owners[part.data_ptr()] > 1 for part in held.parts):
                raise HeteroError(
                    f"the KV cache of sequence {number} is damaged: its layers hold {held.lengths} tokens, its storage "
                    f"is {', '.join(f'{part.dtype} {tuple(part.shape)}' for part in held.parts)}."
                )

    def _is_whole(self, held: _Sequence) -> bool:
        """Return whether all parts have one capacity and no layer holds more tokens than that or the layer before."""
        capacity = max((part.shape[2] for part in held.parts if part.dim() > 2), default=0)
        found = [(tuple(part.shape), part.numpy().dtype, part.is_contiguous()) for part in held.parts]
        expected = [(shape, np.dtype(dtype), True) for shape, dtype in self._shapes(capacity)]
        bounded = [min(self.max_tokens, held.first + capacity), *held.lengths, 0]
        fits = capacity <= self.max_tokens and bounded == sorted(bounded, reverse=True)
        return found == expected and len(held.lengths) == self.n_layers and fits

    def _empty(self) -> _Sequence:
        return _Sequence(self._room(0), [0] * self.n_layers)

    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """See LayeredCache. Raises: MemoryError: if memory runs out."""
        for sequence, length in lengths.items():
            held = self._sequences[sequence]
            if length > held.first + held.parts[0].shape[2]:
                self._move(sequence, max(held.first, self.first_needed(min(held.lengths))), length)

    def _begin_at(self, sequence: int, first: int, length: int) -> None:
        held = self._sequences[sequence]
        held.view, held.first = None, first  # in this order, as Ctrl-C may come between them
        self._move(sequence, first, length)

    def _move(self, sequence: int, first: int, length: int) -> None:
        """Move a sequence's keys and values so that index 0 is position `first` and position length - 1 has a place.

        If the storage must grow, one assignment replaces all parts, so that Ctrl-C can't leave keys, values and view
        with different sizes. If not, the layers count as empty meanwhile.
        """
        held = self._sequences[sequence]
        capacity, n_dropped, lengths = held.parts[0].shape[2], first - held.first, [*held.lengths]
        kept = slice(n_dropped, max(first, *lengths) - held.first)
        n_kept = kept.stop - kept.start
        if length - first > capacity:
            parts = self._room(self._capacity(capacity, length - first))
            for new, old in zip(parts, held.parts, strict=True):
                new[:, :, :n_kept] = old[:, :, kept]
            self._sequences[sequence] = _Sequence(parts, held.lengths, first)
            return
        held.lengths[:], held.view = [0] * self.n_layers, None
        for part in held.parts:
            for layer in part.numpy():
                layer[:, :n_kept] = layer[:, kept]
        held.first, held.lengths[:] = first, lengths

    def _capacity(self, present: int, needed: int) -> int:
        """Return the capacity of a storage that grows to hold `needed` tokens."""
        most = max(needed, kept_tokens(self.max_tokens, self.window))
        return min(most, max(2 * present, -(-needed // PAGE_TOKENS) * PAGE_TOKENS))

    def _room(self, capacity: int) -> tuple[Tensor, ...]:
        # NumPy asks the system for huge pages, torch does not: decoding the demo model after 1,024 tokens makes 850
        # tokens/s on one thread, 700 without (Zen 5, 2026-11-21).
        return tuple(torch.from_numpy(np.zeros(shape, dtype)) for shape, dtype in self._shapes(capacity))

    def _shapes(self, capacity: int) -> list[tuple[tuple[int, ...], type]]:
        """Return the shape and type of each part of a sequence's storage."""
        line = (self.n_layers, self.n_kv_heads, capacity)
        codes, scales = ((*line, self.head_dim), KINDS[self.kind]), (line, np.float32)
        return [codes] * self._n_stored + ([scales] * self._n_stored if self.kind == "int8" else [])


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize (n_kv_heads, head_dim) to int8 codes, ties to even, with scales max |x| / 127 (n_kv_heads,)."""
    peak = x.abs().amax(-1)
    small = peak < SMALLEST
    top = torch.full_like(peak, 127.0)  # a tensor: torch divides by numbers with a rounded inverse
    inverse = torch.where(small, 0.0, top / torch.where(small, 1.0, peak))
    codes = torch.round(x * inverse[:, None]).to(torch.int8)
    return codes, torch.where(small, 0.0, peak / top)
