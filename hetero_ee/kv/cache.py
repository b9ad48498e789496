"""The KV cache that executors use, on any device, and the base of those on one device.

Each layer has a length of its own for each sequence, so that tokens may be pending after any layer: they have passed
the layers up to it and none after it. Rollback is exact: a forgotten position is written again before it is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hetero_ee.kv.batch import Batch


class KvCache(ABC):
    """KV cache of sequences, which are opened, extended, truncated and closed by number.

    max_tokens: positions a sequence may have.
    """

    max_tokens: int

    @property
    @abstractmethod
    def held_layers(self) -> tuple[int, ...]:
        """The held layers' numbers in the model, ascending."""

    @property
    @abstractmethod
    def parts(self) -> "tuple[LayeredCache[Any], ...]":
        """The caches that it consists of: layers whose state has one shape on one device."""

    @abstractmethod
    def part(self, layer: int) -> "LayeredCache[Any]":
        """Return the part that holds this layer. Raises: KeyError: if none does."""

    @property
    @abstractmethod
    def sequences(self) -> tuple[int, ...]:
        """Numbers of the open sequences."""

    @property
    @abstractmethod
    def n_bytes(self) -> int: ...

    @abstractmethod
    def open(self, sequence: int) -> None:
        """Start an empty sequence. Raises: ValueError: if it is open."""

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Free the sequence's memory. Closing an unknown one does nothing."""

    @abstractmethod
    def lengths(self, sequence: int) -> list[int]:
        """Return how many tokens of the sequence have passed each of the held layers."""

    @abstractmethod
    def length_at(self, sequence: int, layer: int) -> int:
        """Return how many tokens have passed this layer. Raises: KeyError: if it is not held."""

    @abstractmethod
    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        """Roll the sequence back to at most `length` tokens in these layers; None means all layers."""

    @abstractmethod
    def admit(self, batch: Batch, layers: range | None = None) -> None:
        """Allocate memory for the batch's tokens in these layers, once per pass; None means all layers.

        Raises:
            ValueError: if a token does not follow the last one that these layers hold of its sequence, or has not
                passed the layer before them. No token is admitted then, nor if memory runs out.
        """

    @abstractmethod
    def check(self) -> None:
        """Check lengths against storage. Raises: HeteroError: if they contradict each other."""

    def open_new(self) -> int:
        """Start an empty sequence and return its number, the lowest free one."""
        taken = set(self.sequences)
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self.open(number)
        return number

    def length(self, sequence: int) -> int:
        """Return how many tokens of the sequence have passed every layer."""
        return min(self.lengths(sequence), default=0)

    def truncate(self, sequence: int, length: int) -> int:
        """Forget every position from `length` on, in each layer, and return how many tokens are left in all of them.

        Raises:
            ValueError: if no layer holds that many.
        """
        longest = max(self.lengths(sequence), default=length)
        if not 0 <= length <= longest:
            raise ValueError(f"sequence {sequence} holds {longest} tokens, it can't be cut to {length}.")
        self.cut(sequence, length)
        return self.length(sequence)


class OpenSequence(Protocol):
    """An open sequence. lengths: tokens that each layer holds."""

    lengths: list[int]


S = TypeVar("S", bound=OpenSequence)


class LayeredCache(KvCache, Generic[S]):
    """Base of caches that hold some of a model's layers, numbered 0, 1, 2, ... inside.

    Args:
        layers: their numbers in the model, ascending; None for the first n_layers.
    """

    def __init__(self, n_layers: int, max_tokens: int, layers: Sequence[int] | None = None) -> None:
        self.n_layers, self.max_tokens = n_layers, max_tokens
        self._layers = tuple(range(n_layers) if layers is None else layers)
        if len(self._layers) != n_layers:
            raise ValueError(f"a cache of {n_layers} layers can't hold {len(self._layers)}.")
        if list(self._layers) != sorted(set(self._layers)):
            raise ValueError(f"layers {self._layers} must ascend.")
        self._indices = {layer: index for index, layer in enumerate(self._layers)}
        self._sequences: dict[int, S] = {}

    @abstractmethod
    def _empty(self) -> S:
        """Return a sequence without tokens."""

    @abstractmethod
    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """Allocate memory for these lengths of sequences, or for none of them if that raises an error."""

    @property
    def held_layers(self) -> tuple[int, ...]:
        return self._layers

    @property
    def parts(self) -> "tuple[LayeredCache[Any], ...]":
        return (self,)

    def part(self, layer: int) -> "LayeredCache[Any]":
        return self

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    def index(self, layer: int) -> int:
        """Return the layer's index in the storage. Raises: KeyError: if it is not held."""
        return self._indices[layer]

    def open(self, sequence: int) -> None:
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already.")
        self._sequences[sequence] = self._empty()

    def close(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)

    def lengths(self, sequence: int) -> list[int]:
        return self._sequences[sequence].lengths

    def length_at(self, sequence: int, layer: int) -> int:
        return self._sequences[sequence].lengths[self._indices[layer]]

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        held, part = self._sequences[sequence], self._slice(layers)
        held.lengths[part] = [min(length, each) for each in held.lengths[part]]

    def admit(self, batch: Batch, layers: range | None = None) -> None:
        part = self._slice(layers)
        if part.start == part.stop:
            return
        lengths = self._lengths_with(batch, part)
        self._make_room(lengths)
        for number, length in lengths.items():
            self._sequences[number].lengths[part] = [length] * (part.stop - part.start)

    def _slice(self, layers: range | None) -> slice:
        """Return which held layers are in a range of the model's, None for all. Raises ValueError if it has gaps."""
        if layers is None:
            return slice(0, self.n_layers)
        if layers.step != 1:
            raise ValueError(f"{layers} are not layers that follow each other.")
        found = [index for layer, index in self._indices.items() if layer in layers]
        return slice(found[0], found[-1] + 1) if found else slice(0, 0)

    def _lengths_with(self, batch: Batch, part: slice) -> dict[int, int]:
        """Return each sequence's tokens in these layers after the batch. Raises: ValueError: as admit()."""
        before: dict[int, int] = {}
        for sequence in self._sequences.keys() & set(batch.sequences):
            mine = self._sequences[sequence].lengths[part]
            before[sequence] = mine[0]
            if mine.count(mine[0]) != len(mine):
                raise ValueError(
                    f"sequence {sequence} holds {min(mine)} tokens in one layer and {max(mine)} in another."
                )
        after = batch.lengths_after(before, self.max_tokens)
        for sequence, length in after.items():
            if part.start and (n_passed := self._sequences[sequence].lengths[part.start - 1]) < length:
                raise ValueError(
                    f"{n_passed} tokens of sequence {sequence} have passed the layer before, not {length}."
                )
        return after
