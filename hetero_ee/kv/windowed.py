"""Base of caches of keys and values, which drop the positions that a sliding window has passed.

When a pass begins, the cache drops whole blocks of positions. It keeps those that the tokens of the pass see, and those
that tokens see after a rollback by LOG_TOKENS. A longer rollback restores a snapshot or reads the sequence again.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import LayeredCache, OpenSequence
from hetero_ee.layers.state import BLOCK_TOKENS, LOG_TOKENS


class WindowedSequence(OpenSequence, Protocol):
    """An open sequence, of which positions before `first` have been dropped."""

    first: int


S = TypeVar("S", bound=WindowedSequence)


class WindowedCache(LayeredCache[S]):
    """Base of caches of layers with keys and values.

    `window` is the number of positions that a token sees, its own included; None for all, and nothing is dropped.
    """

    window: int | None = None

    @abstractmethod
    def _begin_at(self, sequence: int, first: int, length: int) -> None:
        """Allocate memory for positions first..length-1 of an empty sequence. `first` begins a block."""

    def first_needed(self, length: int) -> int:
        """Return the first position, at the start of a block, that is needed after `length` tokens."""
        if self.window is None:
            return 0
        return max(0, length - LOG_TOKENS + 1 - self.window) // BLOCK_TOKENS * BLOCK_TOKENS

    def first_stored(self, sequence: int, length: int) -> int:
        """Return the first stored position that is needed if the sequence has, or is cut to, `length` tokens."""
        return max(self._sequences[sequence].first, self.first_needed(length))

    @property
    def is_bounded(self) -> bool:
        return self.window is not None and self.window + LOG_TOKENS < self.max_tokens

    def restorable(self, sequence: int, length: int, layers: range | None = None) -> int:
        return length if self._reaches(sequence, length, layers) else 0

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        if self._reaches(sequence, length, layers):
            super().cut(sequence, length, layers)
        else:
            super().cut(sequence, 0)
        held = self._sequences[sequence]
        if held.first and not any(held.lengths):
            self._begin_at(sequence, 0, 0)

    def admit(self, batch: Batch, layers: range | None = None) -> None:
        for sequence in self._sequences.keys() & set(batch.sequences):
            if not any(self.lengths(sequence)):  # as after a restoration that Ctrl-C has ended
                self.cut(sequence, 0)
        super().admit(batch, layers)

    def adopt(self, sequence: int, first: int, length: int) -> None:
        self._begin_at(sequence, first, length)
        self.lengths(sequence)[:] = [length] * self.n_layers

    def snapshot(self, sequence: int) -> tuple[Tensor, ...]:
        if self.window is None:
            return ()
        length = self.length(sequence)
        first = self.first_stored(sequence, length)
        every = [part for layer in self.held_layers for part in self.stored(layer, sequence, first, length)]
        return tuple(part.to("cpu", copy=True) for part in every)

    def restore(self, sequence: int, length: int, parts: Sequence[Tensor]) -> None:
        if self._reaches(sequence, length, None):
            super().cut(sequence, length)
            return
        self.cut(sequence, 0)  # until all is copied, as Ctrl-C may end the copying
        first, n_parts = length - parts[0].shape[1], len(parts) // self.n_layers
        self._begin_at(sequence, first, length)
        for index, layer in enumerate(self.held_layers):
            self.store(layer, sequence, first, parts[index * n_parts : (index + 1) * n_parts])
        self.lengths(sequence)[:] = [length] * self.n_layers

    def _reaches(self, sequence: int, length: int, layers: range | None) -> bool:
        """Return whether the layers hold at most `length` tokens, or the next token sees only stored positions."""
        held = self._sequences[sequence]
        is_stored = self.window is None or held.first <= max(0, length + 1 - self.window)
        return is_stored or max(held.lengths[self._slice(layers)], default=0) <= length
