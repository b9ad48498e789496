"""The KV caches of several devices as one: each layer's keys and values lie where the layer is computed."""

from collections.abc import Mapping
from typing import Any

from hetero_ee.errors import HeteroError
from hetero_ee.runtime.batch import Batch


class DeviceCaches:
    """The interface of KvCache over caches of disjoint layers, at least one of them with layers.

    What goes wrong in one of them is undone in the others.
    """

    def __init__(self, caches: Mapping[str, Any], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._caches = [cache for cache in caches.values() if cache.n_layers]
        self._holder = {layer: cache for cache in self._caches for layer in cache.held_layers}

    def open(self, sequence: int) -> None:
        """Starts an empty sequence in every cache. Raises what they raise, and opens none."""
        opened = []
        try:
            for cache in self._caches:
                cache.open(sequence)
                opened.append(cache)
        except BaseException:
            for cache in opened:
                cache.close(sequence)
            raise

    def open_new(self) -> int:
        """Starts an empty sequence under the lowest free number, which it returns."""
        taken = set(self._caches[0].sequences)
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self.open(number)
        return number

    def close(self, sequence: int) -> None:
        """Frees the sequence's memory; closing an unknown one does nothing."""
        for cache in self._caches:
            cache.close(sequence)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Numbers of the open ones."""
        numbers: tuple[int, ...] = self._caches[0].sequences
        return numbers

    @property
    def held_layers(self) -> tuple[int, ...]:
        """Numbers of all layers, in order."""
        return tuple(sorted(self._holder))

    def length(self, sequence: int) -> int:
        """Tokens of the sequence that have passed every layer."""
        lengths: list[int] = [cache.length(sequence) for cache in self._caches]
        return min(lengths)

    def length_at(self, sequence: int, layer: int) -> int:
        """Tokens of the sequence that have passed this layer."""
        length: int = self._holder[layer].length_at(sequence, layer)
        return length

    def truncate(self, sequence: int, length: int, layers: range | None = None) -> None:
        """Forgets every position from `length` on in these layers, None for all.

        Raises ValueError where none of them holds so many.
        """
        held = self._holder if layers is None else [layer for layer in layers if layer in self._holder]
        longest = max((self.length_at(sequence, layer) for layer in held), default=length)
        if not 0 <= length <= longest:
            raise ValueError(f"sequence {sequence} holds {longest} tokens, it can't be cut to {length}.")
        self.cut(sequence, length, layers)

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        """Leaves these layers, None for all, at most `length` tokens of the sequence."""
        for cache in self._caches:
            cache.cut(sequence, length, layers)

    def admit(self, batch: Batch, layers: range | None = None) -> None:
        """Makes room for the rows in these layers, None for all. Raises what the caches raise, and admits none."""
        first: dict[int, int] = {}
        for _, sequence, position in batch.places():
            first.setdefault(sequence, position)
            if layers and layers.start - 1 in self._holder and position >= self.length_at(sequence, layers.start - 1):
                raise ValueError(f"sequence {sequence}: position {position} has not passed layer {layers.start - 1}.")
        admitted: list[Any] = []
        try:
            for cache in self._caches:
                cache.admit(batch, layers)
                admitted.append(cache)
        except BaseException:
            for cache in admitted:
                for sequence, position in first.items():
                    cache.cut(sequence, position, layers)
            raise

    def read(self, layer: int, sequence: int, first: int, end: int) -> Any:
        """See KvCache.read."""
        return self._holder[layer].read(layer, sequence, first, end)

    def write(self, layer: int, batch: Batch, keys: Any, values: Any) -> None:
        """See KvCache.write."""
        self._holder[layer].write(layer, batch, keys, values)

    @property
    def n_bytes(self) -> int:
        return sum(cache.n_bytes for cache in self._caches)

    def check(self) -> None:
        """Raises HeteroError where a cache is damaged, or where they hold other sequences."""
        for cache in self._caches:
            cache.check()
        for cache in self._caches:
            if set(cache.sequences) != set(self.sequences):
                raise HeteroError(f"the KV caches hold sequences {cache.sequences} and {self.sequences}.")
        for sequence in self.sequences:
            lengths = [self.length_at(sequence, layer) for layer in self.held_layers]
            if lengths != sorted(lengths, reverse=True):
                raise HeteroError(f"the KV caches of sequence {sequence} are damaged: layers hold {lengths} tokens.")
