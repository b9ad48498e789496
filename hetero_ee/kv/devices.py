"""The KV caches of several devices as one: each layer's keys and values are where the layer is computed."""

from collections.abc import Iterable

from hetero_ee.errors import HeteroError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache


class DeviceCaches(KvCache):
    """caches: of disjoint layers, at least one of them with layers. What goes wrong in one is undone in the others."""

    def __init__(self, caches: Iterable[KvCache], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._caches = [cache for cache in caches if cache.held_layers]
        holders = {layer: cache for cache in self._caches for layer in cache.held_layers}
        self._holders = dict(sorted(holders.items()))

    @property
    def held_layers(self) -> tuple[int, ...]:
        return tuple(self._holders)

    @property
    def sequences(self) -> tuple[int, ...]:
        return self._caches[0].sequences

    @property
    def n_bytes(self) -> int:
        return sum(cache.n_bytes for cache in self._caches)

    def open(self, sequence: int) -> None:
        opened = []
        try:
            for cache in self._caches:
                cache.open(sequence)
                opened.append(cache)
        except BaseException:
            for cache in opened:
                cache.close(sequence)
            raise

    def close(self, sequence: int) -> None:
        for cache in self._caches:
            cache.close(sequence)

    def lengths(self, sequence: int) -> list[int]:
        return [cache.length_at(sequence, layer) for layer, cache in self._holders.items()]

    def length_at(self, sequence: int, layer: int) -> int:
        return self._holders[layer].length_at(sequence, layer)

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        for cache in self._caches:
            cache.cut(sequence, length, layers)

    def admit(self, batch: Batch, layers: range | None = None) -> None:
        first: dict[int, int] = {}
        for _, sequence, position in batch.entries():
            first.setdefault(sequence, position)
            if layers and layers.start - 1 in self._holders and position >= self.length_at(sequence, layers.start - 1):
                raise ValueError(f"sequence {sequence}: position {position} has not passed layer {layers.start - 1}.")
        admitted: list[KvCache] = []
        try:
            for cache in self._caches:
                cache.admit(batch, layers)
                admitted.append(cache)
        except BaseException:
            for cache in admitted:
                for sequence, position in first.items():
                    cache.cut(sequence, position, layers)
            raise

    def check(self) -> None:
        for cache in self._caches:
            cache.check()
            if set(cache.sequences) != set(self.sequences):
                raise HeteroError(f"the KV caches hold sequences {cache.sequences} and {self.sequences}.")
        for sequence in self.sequences:
            lengths = self.lengths(sequence)
            if lengths != sorted(lengths, reverse=True):
                raise HeteroError(f"the KV caches of sequence {sequence} are damaged: layers hold {lengths} tokens.")
