"""Keys and values by layer, sequence and absolute position: fp32, fp16 or int8 with a scale a position and head.

Every layer has a length of its own for each sequence, so that rows may wait in front of a layer: they have passed the
layers before it and none behind. Rolling back is exact: what is forgotten is written again before it is read.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_ee.errors import HeteroError
from hetero_ee.runtime.held_layers import HeldLayers, lengths_with
from hetero_ee.runtime.rows import Rows

PAGE_TOKENS = 256  # a sequence's first room; it doubles from there, so that copying stays cheap
KINDS = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
SMALLEST = 1e-30  # a head below it everywhere is stored as zero, as the kernels do


@dataclass(slots=True)
class _Sequence:
    """Room of one sequence. parts: keys, values (n_layers, n_kv_heads, capacity, head_dim), then for int8 their scales
    (n_layers, n_kv_heads, capacity). lengths: tokens that each layer holds; view: what a user of the storage has made
    of it, see KvCache.view."""

    parts: tuple[Tensor, ...]
    lengths: list[int]
    view: Any = None


@dataclass(slots=True)
class KvCache:
    """max_tokens: positions a sequence may have. Sequences are opened, extended, truncated and closed by number.

    layers: which of a model's layers, the first n_layers where None. kind: "fp32", "fp16" or "int8".
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    max_tokens: int
    layers: tuple[int, ...] | None = None
    kind: str = "fp32"
    _held: HeldLayers = field(init=False, repr=False)
    _sequences: dict[int, _Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no cache is called {self.kind}; there are {', '.join(KINDS)}.")
        self._held = HeldLayers(self.n_layers, self.layers)

    def open(self, sequence: int) -> None:
        """Starts an empty sequence. Raises ValueError where it is open."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already.")
        self._sequences[sequence] = _Sequence(self._room(0), [0] * self.n_layers)

    def open_new(self) -> int:
        """Starts an empty sequence under the lowest free number, which it returns."""
        number = next(number for number in range(len(self._sequences) + 1) if number not in self._sequences)
        self.open(number)
        return number

    def close(self, sequence: int) -> None:
        """Frees the sequence's memory; closing an unknown one does nothing."""
        self._sequences.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """Tokens of the sequence that have passed every layer."""
        return min(self._sequences[sequence].lengths, default=0)

    def length_at(self, sequence: int, layer: int) -> int:
        """Tokens of the sequence that have passed this layer: more than `length` where rows wait behind it."""
        return self._sequences[sequence].lengths[self._held.place(layer)]

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets every position from `length` on, in each layer. Raises ValueError where no layer holds so many."""
        held = self._sequences[sequence]
        longest = max(held.lengths, default=length)
        if not 0 <= length <= longest:
            raise ValueError(f"sequence {sequence} holds {longest} tokens, it can't be cut to {length}.")
        self.cut(sequence, length)

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        """Leaves these layers, None for all, at most `length` tokens of the sequence."""
        held, places = self._sequences[sequence], self._held.places(layers)
        held.lengths[places] = [min(length, each) for each in held.lengths[places]]

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of the open ones."""
        return tuple(self._sequences)

    @property
    def held_layers(self) -> tuple[int, ...]:
        """Numbers of the layers it holds, in the model."""
        return self._held.layers

    def admit(self, rows: Rows, layers: range | None = None) -> None:
        """Makes room for the rows in these layers, None for all, once a pass.

        Raises ValueError, and admits none, unless each follows the last token that the layers hold of its sequence and
        has passed the layer before them; MemoryError likewise where there is no room.
        """
        places = self._held.places(layers)
        if places.start == places.stop:
            return
        lengths = {number: held.lengths for number, held in self._sequences.items()}
        after = lengths_with(rows, lengths, places, self.max_tokens)
        for sequence, length in after.items():
            self._grow(sequence, length)
        for sequence, length in after.items():
            self._sequences[sequence].lengths[places] = [length] * (places.stop - places.start)

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Keys and values (m, n_kv_heads, head_dim) of admitted rows."""
        place = self._held.place(layer)
        for row, sequence, position in rows.places():
            parts = self._sequences[sequence].parts
            for index, x in enumerate((keys[row], values[row])):
                if self.kind == "int8":
                    codes, scale = _int8(x)
                    parts[index][place, :, position] = codes
                    parts[2 + index][place, :, position] = scale
                else:
                    parts[index][place, :, position] = x.to(parts[index].dtype)

    def read(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values, fp32 (n_kv_heads, end - first, head_dim), of positions first..end-1; valid until the next
        admit."""
        place, parts = self._held.place(layer), self._sequences[sequence].parts
        keys, values = (part[place, :, first:end].float() for part in parts[:2])
        if self.kind == "int8":
            keys, values = (
                codes * scale[place, :, first:end, None] for codes, scale in zip((keys, values), parts[2:], strict=True)
            )
        return keys, values

    def stored(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, ...]:
        """Positions first..end-1 as they are stored, to read and to write, valid until the next admit: keys and values
        (n_kv_heads, end - first, head_dim), and for int8 their scales (n_kv_heads, end - first)."""
        place = self._held.place(layer)
        return tuple(part[place, :, first:end] for part in self._sequences[sequence].parts)

    def place(self, layer: int) -> int:
        """Where the layer's keys and values lie among those of the storage. Raises KeyError for one not held."""
        return self._held.place(layer)

    def view(self, sequence: int, make: Callable[..., Any]) -> Any:
        """make(*parts) of the sequence's whole storage: keys, values, and for int8 their scales.

        Made once and kept until the sequence grows or closes.
        """
        held = self._sequences[sequence]
        if held.view is None:
            held.view = make(*held.parts)
        return held.view

    @property
    def n_bytes(self) -> int:
        return sum(part.nbytes for held in self._sequences.values() for part in held.parts)

    def check(self) -> None:
        """Raises HeteroError where the lengths or the storage of a sequence contradict each other."""
        owners = Counter(part.data_ptr() for held in self._sequences.values() for part in held.parts)
        for number, held in self._sequences.items():
            if not self._is_whole(held) or any(part.nbytes and owners[part.data_ptr()] > 1 for part in held.parts):
                raise HeteroError(
                    f"the KV cache of sequence {number} is damaged: its layers hold {held.lengths} tokens, its storage "
                    f"is {', '.join(f'{part.dtype} {tuple(part.shape)}' for part in held.parts)}."
                )

    def _is_whole(self, held: _Sequence) -> bool:
        """Whether parts are those of one room, and no layer holds more than the one before, or than there is room."""
        capacity = max((part.shape[2] for part in held.parts if part.dim() > 2), default=0)
        found = [(tuple(part.shape), part.numpy().dtype, part.is_contiguous()) for part in held.parts]
        expected = [(shape, np.dtype(dtype), True) for shape, dtype in self._shapes(capacity)]
        bounded = [self.max_tokens, capacity, *held.lengths, 0]
        return found == expected and len(held.lengths) == self.n_layers and bounded == sorted(bounded, reverse=True)

    def _grow(self, sequence: int, length: int) -> None:
        """In one step, so that a Ctrl-C in here can't leave keys, values and view of different sizes."""
        held = self._sequences[sequence]
        capacity = held.parts[0].shape[2]
        if length <= capacity:
            return
        parts = self._room(min(self.max_tokens, max(2 * capacity, -(-length // PAGE_TOKENS) * PAGE_TOKENS)))
        for new, old in zip(parts, held.parts, strict=True):
            new[:, :, :capacity] = old
        self._sequences[sequence] = _Sequence(parts, held.lengths)

    def _room(self, capacity: int) -> tuple[Tensor, ...]:
        # NumPy asks the system for huge pages, torch does not: decoding the demo model behind 1,024 tokens 850 tokens/s
        # on one thread, 700 without (Zen 5, 2026-11-21).
        return tuple(torch.from_numpy(np.zeros(shape, dtype)) for shape, dtype in self._shapes(capacity))

    def _shapes(self, capacity: int) -> list[tuple[tuple[int, ...], type]]:
        """Shape and type of each part of a sequence's storage."""
        line = (self.n_layers, self.n_kv_heads, capacity)
        codes, scales = ((*line, self.head_dim), KINDS[self.kind]), (line, np.float32)
        return [codes, codes, scales, scales] if self.kind == "int8" else [codes, codes]


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n_kv_heads, head_dim) -> codes, to nearest, ties to even, and scales max |x| / 127, (n_kv_heads,)."""
    peak = x.abs().amax(-1)
    small = peak < SMALLEST
    top = torch.full_like(peak, 127.0)  # torch multiplies by a rounded inverse where one side is a number
    inverse = torch.where(small, 0.0, top / torch.where(small, 1.0, peak))
    codes = torch.round(x * inverse[:, None]).to(torch.int8)
    return codes, torch.where(small, 0.0, peak / top)
