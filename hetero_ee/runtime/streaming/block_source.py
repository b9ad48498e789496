"""Sources of streamed blocks: real copies through pinned buffers, or none on an emulated machine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hetero_ee.models.blocks import Block, least_activations
from hetero_ee.runtime.devices.device import GPU, Device, Event, Link
from hetero_ee.runtime.streaming.streaming import N_BUFFERS
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.weight import DenseWeight, TileWeight, Weight

N_PINNED = 3  # one is being filled, one is being copied, and a third keeps them from waiting for each other
ALIGNMENT = 256  # bytes, of each tensor in a buffer, as in GPU allocators
PIECE_BYTES = 4 * 2**20  # per copy: hidden states need to wait for one piece at most
MoreBytes = Callable[[int], int]


class MappedBlocks:
    """Blocks that an emulated GPU streams. The link's time is counted, and the tensors stay where they are.

    Args:
        more_bytes: function of the block number: bytes that are copied in addition to the block's weights.
    """

    n_buffers = N_BUFFERS

    def __init__(
        self, blocks: Sequence[Block], weights: ModelWeights, link: Link, more_bytes: MoreBytes = lambda block: 0
    ) -> None:
        self._blocks, self._link, self._more_bytes = tuple(blocks), link, more_bytes
        self._weights = [block_weights(block, weights) for block in blocks]

    def fetch(self, block: int, buffer: int, after: Sequence[Event]) -> tuple[ModelWeights, Event]:
        found = self._weights[block]
        n_bytes = found.n_bytes + self._more_bytes(block)
        return self._link.copy(self._blocks[block].name, n_bytes, GPU, lambda: found, after)

    def close(self) -> None:
        """Do nothing: there are no buffers."""


class PinnedBlocks:
    """Blocks that a GPU streams from mapped memory, through a pinned buffer, to a device buffer.

    For the same block and buffer, fetch returns the same object each time. The caller must claim the buffers' memory.

    Raises:
        DeviceMemoryError: if the buffers don't fit.
    """

    n_buffers = N_BUFFERS

    def __init__(
        self,
        blocks: Sequence[Block],
        weights: ModelWeights,
        gpu: Device,
        link: Link,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._blocks, self._link, self._piece_bytes = tuple(blocks), link, piece_bytes
        self._weights = [block_weights(block, weights) for block in blocks]
        largest_bytes = max(_buffer_bytes(found) for found in self._weights)
        self._buffers = [gpu.empty((largest_bytes,), torch.uint8) for _ in range(N_BUFFERS)]
        self._pinned = [link.host_buffer(largest_bytes) for _ in range(N_PINNED)]
        self._copied: list[Event | None] = [None] * N_PINNED
        self._n_fetched = 0
        self._known: dict[tuple[int, int], ModelWeights] = {}

    @torch.inference_mode()
    def fetch(self, block: int, buffer: int, after: Sequence[Event]) -> tuple[ModelWeights, Event]:
        """Wait for a free pinned buffer, fill it with the block, and begin to copy it to the GPU."""
        found = self._weights[block]
        index = self._n_fetched % N_PINNED
        self._n_fetched += 1
        earlier = self._copied[index]
        if earlier is not None:
            earlier.wait()
        pinned = self._pinned[index]
        for part, target in zip(_tensors(found), _regions(found, pinned), strict=True):
            target.copy_(_as_bytes(part))
        n_bytes = _buffer_bytes(found)

        def begin() -> ModelWeights:
            for start in range(0, n_bytes, self._piece_bytes):
                piece = slice(start, min(start + self._piece_bytes, n_bytes))
                self._buffers[buffer][piece].copy_(pinned[piece], non_blocking=True)
            return self._on_device(block, buffer)

        value, event = self._link.copy(self._blocks[block].name, n_bytes, GPU, begin, after)
        self._copied[index] = event
        return value, event

    def close(self) -> None:
        self._known.clear()
        self._buffers, self._pinned = [], []

    def _on_device(self, block: int, buffer: int) -> ModelWeights:
        """Return the block's weights as views of the device buffer."""
        key = block, buffer
        if key not in self._known:
            found = self._weights[block]
            self._known[key] = _with_tensors(found, iter(_regions(found, self._buffers[buffer])))
        return self._known[key]


def block_weights(block: Block, weights: ModelWeights) -> ModelWeights:
    """Return the weights that one block uses."""
    names = {tensor.name for tensor in block.tensors.values()} | {least_activations(block)}
    return ModelWeights(
        {name: weight for name, weight in weights.matrices.items() if name in names},
        {name: vector for name, vector in weights.vectors.items() if name in names},
        weights.quantizer,
    )


def _tensors(weights: ModelWeights) -> list[Tensor]:
    """Return all tensors of the weights in a fixed order."""
    return [part for weight in weights.matrices.values() for part in _parts(weight)] + list(weights.vectors.values())


def _parts(weight: Weight) -> list[Tensor]:
    match weight:
        case TileWeight():
            return [weight.tiles, weight.scales]
        case RowWeight():
            return [weight.codes, weight.scales]
        case DenseWeight():
            return [weight.values]
    raise TypeError(f"{type(weight).__name__} can't be streamed.")


def _with_tensors(weights: ModelWeights, regions: Iterator[Tensor]) -> ModelWeights:
    """Return a copy of the weights whose tensors are views of these byte regions, in the order of _tensors."""

    def placed(like: Tensor) -> Tensor:
        return next(regions).view(like.dtype).view(like.shape)

    matrices: dict[str, Weight] = {}
    for name, weight in weights.matrices.items():
        if isinstance(weight, TileWeight):
            matrices[name] = replace(weight, tiles=placed(weight.tiles), scales=placed(weight.scales))
        elif isinstance(weight, RowWeight):
            matrices[name] = replace(weight, codes=placed(weight.codes), scales=placed(weight.scales))
        else:
            matrices[name] = DenseWeight(placed(*_parts(weight)))
    return ModelWeights(matrices, {name: placed(vector) for name, vector in weights.vectors.items()}, weights.quantizer)


def _regions(weights: ModelWeights, buffer: Tensor) -> list[Tensor]:
    """Return, for each tensor of the weights, its region in the buffer (uint8)."""
    regions, offset = [], 0
    for part in _tensors(weights):
        regions.append(buffer[offset : offset + part.nbytes])
        offset += _aligned(part.nbytes)
    return regions


def _buffer_bytes(weights: ModelWeights) -> int:
    return sum(_aligned(part.nbytes) for part in _tensors(weights))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
