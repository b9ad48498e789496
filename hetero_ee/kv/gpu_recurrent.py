"""Cache of recurrent layers on a GPU: matrices, logs and inputs of all sequences in tensors that the kernels read."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_ee.device_errors import driver_errors
from hetero_ee.errors import HeteroError
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import LayeredCache
from hetero_ee.kv.recurrent import LANES, LOST
from hetero_ee.layers.state import LOG_TOKENS, RecurrentState
from hetero_ee_kernels.delta_state import DeltaShape, new_delta_state

SETTLED_TOKENS = 8  # a longer log of settled tokens is applied for good: repeating it would cost more than one store
TENSORS = ("states", "inputs", "keys", "deltas", "decays")  # of DeltaState, in RecurrentStorage's order


@dataclass(slots=True)
class _Sequence:
    slot: int  # its index in the tensors
    lengths: list[int]  # tokens that have passed each layer
    bases: list[int]  # for each layer, the position before which the stored matrices are
    n_settled: int = 0  # tokens that no rollback is expected to forget


class GpuRecurrentCache(LayeredCache[_Sequence]):
    """Cache of layers whose state is `state`, on one device. See LayeredCache for `max_tokens` and `layers`.

    The tensors hold n_sequences sequences. If more are open than ever before, the tensors are replaced by
    larger ones and `version` changes. Launches that were recorded for earlier tensors must not be replayed then.
    """

    kind = "fp32"

    def __init__(
        self, state: RecurrentState, max_tokens: int, device: Any, layers: Sequence[int], n_sequences: int = 1
    ) -> None:
        super().__init__(len(layers), max_tokens, layers)
        heads = state.n_key_heads, state.n_value_heads, state.key_dim, state.value_dim
        self.device, self.version = device, 0
        shape = DeltaShape(*heads, state.kernel, LOG_TOKENS)
        shape = shape._replace(n_headless=state.n_channels - shape.n_channels)
        self.pool = new_delta_state(shape, n_sequences, len(layers), device)

    @contextmanager
    def passing(self, sequences: Sequence[int], positions: Sequence[int], layers: Sequence[int]) -> Iterator[None]:
        """Tell the kernels the bases for a pass of these tokens through these layers, which is launched inside.

        An error inside leaves the layers without state, so that cut() does not trust matrices that may be stored
        already.
        """
        indices, firsts, ends = [self.index(layer) for layer in layers], dict[int, int](), dict[int, int]()
        for sequence, position in zip(sequences, positions, strict=True):
            firsts.setdefault(sequence, position)
            ends[sequence] = position + 1
        before, after = torch.zeros(self.pool.bases.shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        later: list[tuple[list[int], int, int]] = []
        for sequence, end in ends.items():
            held = self._sequences[sequence]
            for index in indices:
                base, settled = held.bases[index], min(firsts[sequence], held.n_settled)
                settled = settled if settled - base >= SETTLED_TOKENS else base
                later.append((held.bases, index, max(settled, self.pool.shape.base_after(base, end))))
                before[held.slot, index], after[held.slot, index] = base, later[-1][2]
                held.bases[index] = LOST
        self.pool.bases.copy_(torch.stack([before, after]), non_blocking=True)
        yield
        for bases, index, base in later:
            bases[index] = base

    def settle(self, sequence: int, length: int) -> None:
        self._sequences[sequence].n_settled = length

    def restorable(self, sequence: int, length: int, layers: range | None = None) -> int:
        held, part = self._sequences[sequence], self._slice(layers)
        pairs = zip(held.bases[part], held.lengths[part], strict=True)
        return 0 if any(base > length and (n > length or base == LOST) for base, n in pairs) else length

    def cut(self, sequence: int, length: int, layers: range | None = None) -> None:
        super().cut(sequence, self.restorable(sequence, length, layers), layers)
        held = self._sequences[sequence]
        held.bases = [base if base <= n else 0 for base, n in zip(held.bases, held.lengths, strict=True)]
        held.n_settled = min(held.n_settled, *held.lengths)

    @property
    def is_bounded(self) -> bool:
        return True

    def snapshot(self, sequence: int) -> tuple[Tensor, ...]:
        held = self._sequences[sequence]
        return *(part[held.slot].to("cpu", copy=True) for part in self._tensors()), torch.tensor(held.bases)

    def restore(self, sequence: int, length: int, parts: Sequence[Tensor]) -> None:
        held, (*copies, bases) = self._sequences[sequence], parts
        held.lengths = held.bases = [0] * self.n_layers  # first, as Ctrl-C may end the copying
        for ours, theirs in zip(self._tensors(), copies, strict=True):
            ours[held.slot].copy_(theirs)
        held.lengths, held.bases, held.n_settled = [length] * self.n_layers, bases.tolist(), length

    def stored(self, layer: int, sequence: int, first: int, end: int) -> tuple[Tensor, ...]:
        """See LayeredCache. Returns copies of the layer's whole state in RecurrentStorage's format."""
        index, held = self.index(layer), self._sequences[sequence]
        matrices, inputs, *logs = (part[held.slot, index] for part in self._tensors())
        n_heads, key_dim, value_dim = matrices.shape
        blocks = n_heads, key_dim, -(-value_dim // LANES), LANES
        padded = F.pad(matrices, (0, -value_dim % LANES)).view(blocks).transpose(1, 2)
        found = padded.contiguous(), inputs, *(log.flatten(1) for log in logs), torch.tensor(held.bases[index])
        return tuple(each[None] for each in found)

    def store(self, layer: int, sequence: int, first: int, parts: Sequence[Tensor]) -> None:
        """See LayeredCache. Returns after the copies to the GPU are complete."""
        index, held = self.index(layer), self._sequences[sequence]
        blocks, *others, base = (part[0] for part in parts)
        targets = [part[held.slot, index] for part in self._tensors()]
        matrices = blocks.transpose(1, 2).flatten(2)[..., : targets[0].shape[-1]]
        for ours, theirs in zip(targets, (matrices, *others), strict=True):
            ours.copy_(theirs.reshape(ours.shape))
        held.bases[index] = int(base)

    @property
    def n_parts(self) -> int:
        """Return 0: attention, which would divide the longest sequence into parts, never reads this cache."""
        return 0

    def slots(self, batch: Batch) -> list[int]:
        """Return, for each token, its sequence's index in the tensors."""
        return [self._sequences[sequence].slot for sequence in batch.sequences]

    @property
    def n_bytes(self) -> int:
        return sum(part.nbytes for part in (*self._tensors(), self.pool.bases))

    def check(self) -> None:
        slots = [held.slot for held in self._sequences.values()]
        for number, held in self._sequences.items():
            bounded = [self.max_tokens, *held.lengths, 0]
            bases = zip(held.bases, held.lengths, strict=True)
            is_own = slots.count(held.slot) == 1 and 0 <= held.slot < self.pool.n_slots
            if not is_own or bounded != sorted(bounded, reverse=True) or any(not 0 <= b <= n for b, n in bases):
                raise HeteroError(
                    f"the GPU's recurrent state of sequence {number} is damaged: its layers hold {held.lengths} "
                    f"tokens, its matrices those before {held.bases}, in slot {held.slot}."
                )

    def release(self) -> None:
        """Close every sequence and free the tensors. The cache can't hold tokens afterwards."""
        self._sequences.clear()
        self.pool = new_delta_state(self.pool.shape, 0, self.n_layers, self.device)

    def _tensors(self) -> list[Tensor]:
        return [getattr(self.pool, name) for name in TENSORS]

    def _empty(self) -> _Sequence:
        taken = {held.slot for held in self._sequences.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        if slot == self.pool.n_slots:
            self._grow()
        return _Sequence(slot, [0] * self.n_layers, [0] * self.n_layers)

    def _grow(self) -> None:
        """Replace the tensors by ones for one more sequence. Raises: DeviceMemoryError: if they don't fit."""
        with driver_errors("the recurrent state of one more sequence", lambda: 0):
            pool = new_delta_state(self.pool.shape, self.pool.n_slots + 1, self.n_layers, self.device)
            for name, ours in zip(TENSORS, self._tensors(), strict=True):
                getattr(pool, name)[: self.pool.n_slots].copy_(ours)
        self.pool, self.version = pool, self.version + 1

    def _make_room(self, lengths: Mapping[int, int]) -> None:
        """See LayeredCache. The state does not grow with a sequence."""
