"""Define the KV cache that executors use, whatever the device, and the base of caches on one device.

Each layer has its own length of each sequence. So tokens may be pending after any layer: they have passed through the
layers up to it and through none after it. Rollback is exact: a forgotten position is written again before it is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from hetero_ee.kv.batch import Batch


class KvCache(ABC):
    """Interface of a KV cache, whose sequences are opened, extended, rolled back and closed by number.

    `max_tokens` is the most positions a sequence may have.
    """

    max_tokens: int

    @property
    @abstractmethod
    def held_layers(self) -> tuple[int, ...]:
        """Indices in the model of the layers whose state the cache holds, ascending."""

    @property
    @abstractmethod
    def parts(self) -> "tuple[LayeredCache[Any], ...]":
        """The caches that this cache consists of. Each holds layers whose state has the same shape, on one device."""

    @abstractmethod
    def part(self, layer: int) -> "LayeredCache[Any]":
        """Return the part of the cache that holds a layer. Raises: KeyError: if none does."""

    @property
    @abstractmethod
    def sequences(self) -> tuple[int, ...]:
        """Numbers of the open sequences."""

    @property
    @abstractmethod
    def n_bytes(self) -> int: ...

    @abstractmethod
    def open(self, sequence: int) -> None:
        """Start an empty sequence. Raises: ValueError: if one with this number is open."""

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Free the sequence's memory. Does nothing if the sequence is not open."""

    @abstractmethod
    def lengths(self, sequence: int) -> list[int]:
        """Return, for each held layer, how many tokens of the sequence have passed through it."""

    @abstractmethod
    def length_at(self, sequence: int, layer: int) -> int:
        """Return how many tokens of the sequence have passed through a layer. Raises: KeyError: if it is not held."""

    @abstractmethod
    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        """Roll the sequence back to at most `length` tokens in the given layers; None means all layers.

        If a layer can't restore that length, all layers are rolled back further, to one that it can restore.
        """

    def keep_path(self, sequence: int, first: int, slots: Sequence[int]) -> None:
        """Make a path of a draft tree the sequence's last tokens, and forget the tree's other tokens.

        Args:
            first: the path's first position.
            slots: the slots of the path's tokens, ascending, none before its token's position.
        """
        moved = [(slot, at) for at, slot in enumerate(slots, first) if slot != at]
        for part in self.parts if moved else ():
            part.move(sequence, moved)
        self.truncate(sequence, first + len(slots))

    @abstractmethod
    def admit(self, batch: Batch, layers: range | None = None) -> None:
        """Allocate memory for the batch's tokens in the given layers, once per pass; None means all layers.

        Raises:
            ValueError: if a token does not follow the sequence's last one in these layers, or has not passed through
                the layer before them. No token is admitted then, nor if memory runs out.
        """

    @abstractmethod
    def check(self) -> None:
        """Compare lengths with the allocated storage. Raises: HeteroError: if they contradict each other."""

    def restorable(self, sequence: int, length: int, layers: range | None = None) -> int:
        """Return the most tokens, up to `length`, to which the given layers can be rolled back; None means all."""
        return length

    @property
    def is_bounded(self) -> bool:
        """Whether some layers can be rolled back by a few tokens only, unless mark() has kept their state."""
        return False

    def mark(self, sequence: int) -> None:  # noqa: B027
        """Keep a copy of the state of such layers as it is now, so that cut() can restore this length later."""

    def settle(self, sequence: int, length: int) -> None:
        """Note that the sequence's first `length` tokens are final, so that caches need not be able to forget some."""
        return

    def open_new(self) -> int:
        """Start an empty sequence with the lowest free number and return the number."""
        taken = set(self.sequences)
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self.open(number)
        return number

    def length(self, sequence: int) -> int:
        """Return how many tokens of the sequence have passed through every layer."""
        return min(self.lengths(sequence), default=0)

    def truncate(self, sequence: int, length: int) -> int:
        """Forget every position from `length` on, in each layer, and return how many tokens are left in all of them.

        Raises:
            ValueError: if no layer holds `length` tokens.
        """
        longest = max(self.lengths(sequence), default=length)
        if not 0 <= length <= longest:
            raise ValueError(f"sequence {sequence} holds {longest} tokens, it can't be cut to {length}.")
        self.cut(sequence, length)
        return self.length(sequence)


class OpenSequence(Protocol):
    """An open sequence. `lengths` has the number of tokens in each layer."""

    lengths: list[int]


S = TypeVar("S", bound=OpenSequence)


class LayeredCache(KvCache, Generic[S]):
    """Base of caches that hold some of a model's layers on one device. Inside, these layers have indices 0, 1, 2, ...

    `kind` is the type of keys and values: "fp32", "fp16" or "int8".

    Args:
        layers: the held layers' indices in the model, ascending; None for the first n_layers.
    """

    kind: str
    version = 0  # how often the tensors that a GPU's launches were recorded for have been replaced

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
        """Create an empty sequence."""

    @abstractmethod
    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """Allocate memory for sequences of the given lengths. If that raises an error, no token is admitted."""

    def move(self, sequence: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the state of some slots, in layers that hold them, to lower ones: pairs (from, to) in ascending order.

        Raises: NotImplementedError: if the state is recurrent; such layers get no trees.
        """
        longest = max(self.lengths(sequence), default=0)
        held = [(source, target) for source, target in moves if source < longest]
        if held:
            self._copy_slots(sequence, *zip(*held, strict=True))

    def _copy_slots(self, sequence: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise NotImplementedError

    @abstractmethod
    def stored(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, ...]:
        """Return positions first..end-1 of a layer as they are stored, valid until the next admit().

        Returns:
            Keys and values (n_kv_heads, end - first, head_dim); for int8 also their scales (n_kv_heads, end - first).
        """

    @abstractmethod
    def store(self, layer: int, sequence: int, first: int, parts: Sequence[Tensor]) -> None:
        """Write what `stored` returned to admitted positions of a layer, from `first` on."""

    def snapshot(self, sequence: int) -> tuple[Tensor, ...]:
        """Return copies, in RAM, of the state that cut() can't restore; nothing if it can restore any length."""
        return ()

    def restore(self, sequence: int, length: int, parts: Sequence[Tensor]) -> None:
        """Roll a sequence back to `length` tokens, after which snapshot() returned `parts`."""
        self.cut(sequence, length)

    def first_needed(self, length: int) -> int:
        """Return the first position whose keys and values are needed after `length` tokens."""
        return 0

    def first_stored(self, sequence: int, length: int) -> int:
        """Return the first stored position that is needed after the sequence's first `length` tokens."""
        return 0

    def adopt(self, sequence: int, first: int, length: int) -> None:
        """Make an empty sequence one of `length` tokens. The caller stores the state of positions first..length-1."""
        self._make_room({sequence: length})
        self.lengths(sequence)[:] = [length] * self.n_layers

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
        """Return a layer's index in the storage. Raises: KeyError: if the layer is not held."""
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
        """Return the held layers among `layers`, None for all. Raises ValueError for a range with gaps."""
        if layers is None:
            return slice(0, self.n_layers)
        if layers.step != 1:
            raise ValueError(f"{layers} are not layers that follow each other.")
        found = [index for layer, index in self._indices.items() if layer in layers]
        return slice(found[0], found[-1] + 1) if found else slice(0, 0)

    def _lengths_with(self, batch: Batch, part: slice) -> dict[int, int]:
        """Return each sequence's length in the given layers after the batch. Raises: ValueError: as admit()."""
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
