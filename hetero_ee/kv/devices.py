"""Combine several KV caches into one: each layer's state is on the device that computes the layer."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from hetero_ee.errors import HeteroError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache, LayeredCache
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.kv.gpu_recurrent import GpuRecurrentCache
from hetero_ee.kv.recurrent import RecurrentCache
from hetero_ee.kv.snapshots import Snapshots
from hetero_ee.layers.state import KvState, RecurrentState, kept_tokens
from hetero_ee.models.blocks import layer_states
from hetero_ee.models.spec import ModelSpec
from hetero_ee.options.engine import SNAPSHOT_GIB
from hetero_ee_profiles.units import GIB


class DeviceCaches(KvCache):
    """A KV cache made of several. An operation that fails in one of them is undone in the others.

    Args:
        caches: caches with disjoint layers, of which at least one holds layers.
        snapshot_bytes: RAM for copies of state, see mark().
    """

    def __init__(self, caches: Iterable[KvCache], snapshot_bytes: int = 0) -> None:
        self.snapshots = Snapshots(snapshot_bytes)
        self._caches = [cache for cache in caches if cache.held_layers]
        holders = {layer: cache for cache in self._caches for layer in cache.held_layers}
        self._holders = dict(sorted(holders.items()))

    @property
    def held_layers(self) -> tuple[int, ...]:
        return tuple(self._holders)

    @property
    def max_tokens(self) -> int:
        return self._caches[0].max_tokens

    @max_tokens.setter
    def max_tokens(self, n_tokens: int) -> None:
        for cache in self._caches:
            cache.max_tokens = n_tokens

    @property
    def parts(self) -> tuple[LayeredCache[Any], ...]:
        return tuple(part for cache in self._caches for part in cache.parts)

    def part(self, layer: int) -> LayeredCache[Any]:
        return self._holders[layer].part(layer)

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
        self.snapshots.forget(sequence)
        for cache in self._caches:
            cache.close(sequence)

    def lengths(self, sequence: int) -> list[int]:
        return [cache.length_at(sequence, layer) for layer, cache in self._holders.items()]

    def length_at(self, sequence: int, layer: int) -> int:
        return self._holders[layer].length_at(sequence, layer)

    def restorable(self, sequence: int, length: int, layers: range | None = None) -> int:
        if self._logs_reach(sequence, length, layers):
            return length
        return self.snapshots.latest(sequence, min(length, self.length(sequence)))

    def settle(self, sequence: int, length: int) -> None:
        """See KvCache. Tokens that some layers lack don't count, since the other layers may have to forget them."""
        if self.is_bounded:
            for cache in self._caches:
                cache.settle(sequence, min(length, self.length(sequence)))

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        if self._logs_reach(sequence, length, layers):
            for part in self.parts:
                part.cut(sequence, length, layers)
        else:
            length = self.restorable(sequence, length, layers)
            self.snapshots.n_missed += not length
            copies = self.snapshots.take(sequence, length) if length else None
            for number, part in enumerate(self.parts):
                if copies is None:
                    part.cut(sequence, 0)
                else:
                    part.restore(sequence, length, copies[number])
        self.snapshots.forget(sequence, length)

    def _logs_reach(self, sequence: int, length: int, layers: range | None) -> bool:
        """Return whether the layers can be rolled back to `length` without a snapshot."""
        return all(part.restorable(sequence, length, layers) == length for part in self.parts)

    @property
    def is_bounded(self) -> bool:
        return any(part.is_bounded for part in self.parts)

    def mark(self, sequence: int) -> None:
        lengths = set(self.lengths(sequence))
        if self.is_bounded and self.snapshots.budget_bytes and len(lengths) == 1 and lengths != {0}:
            copies = [part.snapshot(sequence) for part in self.parts]
            self.snapshots.keep(sequence, lengths.pop(), copies)

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


def host_cache(
    spec: ModelSpec,
    max_tokens: int,
    kind: str,
    layers: Sequence[int] | None = None,
    snapshot_bytes: int = int(SNAPSHOT_GIB * GIB),
) -> KvCache:
    """Return a KV cache of the given layers, None for all, in the CPU's memory, with a part for each shape of state.

    A part without heads counts the tokens that have passed through layers without state.
    """
    parts: list[LayeredCache[Any]] = [
        *(
            CpuKvCache(
                len(mine), *shape[:2], max_tokens, mine, kind=kind, window=shape.window, shared_dim=shape.shared_dim
            )
            for shape, mine in kv_layers(spec, layers).items()
        ),
        *(RecurrentCache(state, max_tokens, mine) for state, mine in recurrent_layers(spec, layers).items()),
    ]
    if not parts:
        return CpuKvCache(0, 0, 0, max_tokens, kind=kind)
    is_plain = len(parts) == 1 and isinstance(parts[0], CpuKvCache) and parts[0].window is None
    return parts[0] if is_plain else DeviceCaches(parts, snapshot_bytes)


class GpuCaches(DeviceCaches):
    """Caches of layers with different states on one GPU. A sequence has the same slot in all of them."""

    def __init__(self, caches: Sequence[GpuKvCache | GpuRecurrentCache]) -> None:
        super().__init__(caches)
        self._pools, self._first = caches, caches[0]
        self.device, self.n_parts = self._first.device, max(each.n_parts for each in caches)

    def slots(self, batch: Batch) -> list[int]:
        """Return, for each token, its sequence's row in the page tables."""
        return self._first.slots(batch)

    def release(self) -> None:
        """Close every sequence and free the pools. The caches can't hold tokens afterwards."""
        for pool in self._pools:
            pool.release()


GpuCache = GpuKvCache | GpuRecurrentCache | GpuCaches


def gpu_cache(
    spec: ModelSpec,
    max_tokens: int,
    kind: str,
    device: Any,
    layers: Sequence[int] | None = None,
    *,
    n_slots: int,
    pass_tokens: int = 0,
    n_sequences: int = 1,
) -> GpuCache:
    """Return a cache of the given layers, None for all, on a GPU, with a part for each shape of state.

    Recurrent states and windows of n_sequences are allocated at once, those of more sequences when they are opened.

    Args:
        pass_tokens: see kept_tokens().
    """
    parts: list[GpuKvCache | GpuRecurrentCache] = [
        GpuKvCache(
            (len(mine), *shape[:2], 2 if shape.shared_dim is None else 1),
            max_tokens,
            device,
            pool_tokens=kept_tokens(max_tokens, shape.window, pass_tokens, n_sequences),
            n_slots=n_slots,
            kind=kind,
            layers=mine,
            window=shape.window,
        )
        for shape, mine in kv_layers(spec, layers).items()
    ]
    parts += [
        GpuRecurrentCache(state, max_tokens, device, mine, n_sequences)
        for state, mine in recurrent_layers(spec, layers).items()
    ]
    if not parts:
        parts = [GpuKvCache((0, 0, 0), max_tokens, device, n_slots=n_slots, kind=kind, layers=[])]
    return parts[0] if len(parts) == 1 else GpuCaches(parts)


class KvShape(NamedTuple):
    """The shape of a layer's keys and values. Layers without keys and values of their own have no heads."""

    n_kv_heads: int
    head_dim: int
    window: int | None
    shared_dim: int | None = None  # see AttentionSpec.shared_dim

    @classmethod
    def of(cls, state: KvState) -> Self:
        return cls(state.n_kv_heads, state.head_dim, state.window, state.shared_dim)


def kv_layers(spec: ModelSpec, layers: Sequence[int] | None = None) -> dict[KvShape, list[int]]:
    """Return the given layers, None for all, by the shape of their keys and values. Recurrent layers are left out."""
    shapes: dict[KvShape, list[int]] = {}
    for layer, state in enumerate(layer_states(spec)):
        if (layers is None or layer in layers) and not isinstance(state, RecurrentState):
            shape = KvShape(0, 0, None)
            if isinstance(state, KvState) and state.source is None:
                shape = KvShape.of(state)
            shapes.setdefault(shape, []).append(layer)
    return shapes


def recurrent_layers(spec: ModelSpec, layers: Sequence[int] | None = None) -> dict[RecurrentState, list[int]]:
    """Return the recurrent layers among the given ones, None for all, by their state."""
    found: dict[RecurrentState, list[int]] = {}
    for layer, state in enumerate(layer_states(spec)):
        if isinstance(state, RecurrentState) and (layers is None or layer in layers):
            found.setdefault(state, []).append(layer)
    return found
