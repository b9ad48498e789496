"""Cache of recurrent layers in the CPU's memory: constant in size, and still able to forget the last tokens.

Each layer keeps its matrices as they were before the token at position `base`, and a log of the updates of the tokens
from there on. Forgetting tokens only shortens the log: no matrix is copied. A pass applies the log to the matrices
again, with the same numbers in the same order, which gives the same bits. It stores the matrices as they are after the
tokens that the decoding loop has settled, or later ones if the log would become too long.

The log and the convolution's inputs are rings: position p is at index p modulo their length. Inputs before position 0
count as 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetero_ee.errors import HeteroError
from hetero_ee.kv.cache import LayeredCache
from hetero_ee.layers.state import LOG_TOKENS, RecurrentState

LOST = 2**31 - 1  # base of a layer whose pass has not returned
LANES = 16  # columns of a matrix that the CPU's kernel computes together


@dataclass(frozen=True, slots=True)
class RecurrentStorage:
    """Storage of one sequence in all layers of a cache, fp32 unless noted."""

    matrices: Tensor  # (n_layers, n_value_heads, value_dim / 16, key_dim, 16), the last column block padded
    inputs: Tensor  # (n_layers, n_inputs, n_channels)
    keys: Tensor  # (n_layers, LOG_TOKENS, n_key_heads * key_dim)
    deltas: Tensor  # (n_layers, LOG_TOKENS, n_value_heads * value_dim)
    decays: Tensor  # (n_layers, LOG_TOKENS, n_value_heads)
    bases: Tensor  # int64 (n_layers,)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.matrices, self.inputs, self.keys, self.deltas, self.decays, self.bases


@dataclass(slots=True)
class _Sequence:
    storage: RecurrentStorage
    lengths: list[int]  # tokens that have passed each layer
    n_settled: int = 0  # tokens that no rollback is expected to forget


class RecurrentCache(LayeredCache[_Sequence]):
    """Cache of layers whose state is `state`. See LayeredCache for `max_tokens` and `layers`."""

    kind = "fp32"

    def __init__(self, state: RecurrentState, max_tokens: int, layers: Sequence[int]) -> None:
        super().__init__(len(layers), max_tokens, layers)
        self.state = state

    def storage(self, sequence: int) -> RecurrentStorage:
        return self._sequences[sequence].storage

    def begin(self, layer: int, sequence: int, first: int, n_tokens: int) -> tuple[int, int]:
        """Begin a pass of n_tokens tokens, the first of them at position `first`.

        If the pass moves the layer's base, the base counts as lost until moved() is called, since Ctrl-C may end the
        pass when it has written over a part of the log.

        Returns:
            The layer's base before and after the pass.
        """
        bases, index = self.storage(sequence).bases, self.index(layer)
        base = max(int(bases[index]), first - LOG_TOKENS)
        after = max(base, first + n_tokens - LOG_TOKENS, min(first, self._sequences[sequence].n_settled))
        if after > base:
            bases[index] = LOST
        return base, after

    def settle(self, sequence: int, length: int) -> None:
        self._sequences[sequence].n_settled = length

    def moved(self, layer: int, sequence: int, base: int) -> None:
        """Note that a pass has stored a layer's matrices as they are before position `base`."""
        self.storage(sequence).bases[self.index(layer)] = base

    def restorable(self, sequence: int, length: int, layers: range | None = None) -> int:
        held, part = self._sequences[sequence], self._slice(layers)
        pairs = zip(held.storage.bases.tolist()[part], held.lengths[part], strict=True)
        return 0 if any(base > length and n_tokens > length for base, n_tokens in pairs) else length

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        super().cut(sequence, self.restorable(sequence, length, layers), layers)
        held = self._sequences[sequence]
        held.n_settled = min(held.n_settled, *held.lengths)
        for index, (base, n_tokens) in enumerate(zip(held.storage.bases.tolist(), held.lengths, strict=True)):
            if base > n_tokens:  # restorable() made it 0
                held.storage.matrices[index] = 0.0
                held.storage.bases[index] = 0

    @property
    def is_bounded(self) -> bool:
        return True

    def snapshot(self, sequence: int) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in self.storage(sequence).parts)

    def restore(self, sequence: int, length: int, parts: Sequence[Tensor]) -> None:
        storage, lengths = self.storage(sequence), self._sequences[sequence].lengths
        lengths[:] = [0] * self.n_layers  # first, as Ctrl-C may end the copying
        storage.bases.fill_(LOST)
        for ours, theirs in zip(storage.parts, parts, strict=True):
            ours.copy_(theirs)
        lengths[:] = [length] * self.n_layers
        self._sequences[sequence].n_settled = length

    def stored(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, ...]:
        """See LayeredCache. Returns views of the layer's whole storage, whatever the positions."""
        return tuple(part[self.index(layer)][None] for part in self.storage(sequence).parts)

    def store(self, layer: int, sequence: int, first: int, parts: Sequence[Tensor]) -> None:
        for ours, theirs in zip(self.stored(layer, sequence, first, first), parts, strict=True):
            ours.copy_(theirs)

    @property
    def n_bytes(self) -> int:
        return sum(part.nbytes for held in self._sequences.values() for part in held.storage.parts)

    def check(self) -> None:
        shapes = self._shapes()
        for number, held in self._sequences.items():
            bounded = [self.max_tokens, *held.lengths, 0]
            bases = zip(held.storage.bases.tolist(), held.lengths, strict=True)
            is_whole = [tuple(part.shape) for part in held.storage.parts] == shapes
            if not is_whole or bounded != sorted(bounded, reverse=True) or any(not 0 <= b <= n for b, n in bases):
                raise HeteroError(
                    f"the recurrent state of sequence {number} is damaged: its layers hold {held.lengths} tokens, "
                    f"its matrices those before {held.storage.bases.tolist()}."
                )

    def _empty(self) -> _Sequence:
        *floats, bases = self._shapes()
        # NumPy asks the system for huge pages, see kv/cpu.py.
        matrices, inputs, keys, deltas, decays = (torch.from_numpy(np.zeros(shape, np.float32)) for shape in floats)
        storage = RecurrentStorage(matrices, inputs, keys, deltas, decays, torch.zeros(bases, dtype=torch.int64))
        return _Sequence(storage, [0] * self.n_layers)

    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """See LayeredCache. The storage does not grow."""

    def _shapes(self) -> list[tuple[int, ...]]:
        state, n = self.state, self.n_layers
        return [
            (n, state.n_value_heads, -(-state.value_dim // LANES), state.key_dim, LANES),
            (n, state.n_inputs, state.n_channels),
            (n, LOG_TOKENS, state.n_key_heads * state.key_dim),
            (n, LOG_TOKENS, state.n_value_heads * state.value_dim),
            (n, LOG_TOKENS, state.n_value_heads),
            (n,),
        ]
