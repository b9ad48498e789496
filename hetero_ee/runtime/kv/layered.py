"""What caches of keys and values have in common: sequences by number, with a length of their own in every layer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.kv.held_layers import HeldLayers, lengths_with


class OpenSequence(Protocol):
    """lengths: tokens that each layer holds."""

    lengths: list[int]


S = TypeVar("S", bound=OpenSequence)


class LayeredCache(ABC, Generic[S]):
    """max_tokens: positions a sequence may have. layers: which of a model's, the first n_layers where None.

    Sequences are opened, extended, truncated and closed by number. Raises ValueError for layers that don't ascend.
    """

    def __init__(self, n_layers: int, max_tokens: int, layers: Sequence[int] | None = None) -> None:
        self.n_layers, self.max_tokens = n_layers, max_tokens
        self._held = HeldLayers(n_layers, layers)
        self._sequences: dict[int, S] = {}

    @abstractmethod
    def _empty(self) -> S:
        """A sequence without tokens."""

    @abstractmethod
    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """For so many tokens of these sequences, or for none of them where that raises an error."""

    def open(self, sequence: int) -> None:
        """Starts an empty sequence. Raises ValueError where it is open."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already.")
        self._sequences[sequence] = self._empty()

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

    def place(self, layer: int) -> int:
        """Where the layer's keys and values lie among those of the storage. Raises KeyError for one not held."""
        return self._held.place(layer)

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets every position from `length` on, in each layer. Raises ValueError where no layer holds so many."""
        longest = max(self._sequences[sequence].lengths, default=length)
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

    def admit(self, batch: Batch, layers: range | None = None) -> None:
        """Makes room for the rows in these layers, None for all, once a pass.

        Raises ValueError, and admits none, unless each follows the last token that the layers hold of its sequence and
        has passed the layer before them; likewise what is raised where there is no room.
        """
        places = self._held.places(layers)
        if places.start == places.stop:
            return
        held = {number: each.lengths for number, each in self._sequences.items()}
        lengths = lengths_with(batch, held, places, self.max_tokens)
        self._make_room(lengths)
        for number, length in lengths.items():
            self._sequences[number].lengths[places] = [length] * (places.stop - places.start)
