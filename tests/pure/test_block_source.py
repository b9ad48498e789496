"""Where streamed blocks come from: the same weights on the device, through buffers that are never overwritten early."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.errors import DeviceMemoryError
from hetero_ee.models.blocks import decoder_blocks
from hetero_ee.runtime.devices.device import Event
from hetero_ee.runtime.streaming.block_source import N_PINNED, MappedBlocks, PinnedBlocks, block_weights
from hetero_ee.runtime.streaming.streaming import AtOnce, WeightStream
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import random_weights
from hetero_ee.weights.weight import DenseWeight, TileWeight
from tests.device_support import SPEC, EmulatedMachine, Fault, FaultyDevice, FaultyLink, no_memory

BLOCKS = [block for block in decoder_blocks(SPEC) if block.layer is not None]


@pytest.fixture(params=["tiles", "dense"])
def weights(request: pytest.FixtureRequest) -> ModelWeights:
    found = random_weights(SPEC)
    if request.param == "dense":
        found.matrices.update({name: DenseWeight(weight.dequantize()) for name, weight in found.matrices.items()})
    return found


def same(found: ModelWeights, expected: ModelWeights) -> bool:
    assert found.matrices.keys() == expected.matrices.keys() and found.vectors.keys() == expected.vectors.keys()
    for name, weight in expected.matrices.items():
        assert torch.equal(found.matrices[name].dequantize(), weight.dequantize())
        assert type(found.matrices[name]) is type(weight)
    return all(torch.equal(found.vectors[name], vector) for name, vector in expected.vectors.items())


def offsets(found: ModelWeights) -> list[int]:
    """Bytes from the beginning of the buffer to each tensor."""
    tensors = list(found.vectors.values())
    for weight in found.matrices.values():
        tensors += [weight.tiles, weight.scales] if isinstance(weight, TileWeight) else [weight.values]
    return [tensor.storage_offset() * tensor.element_size() for tensor in tensors]


class LateLink:
    """Copies again when a copy's event is waited for: what lies in the pinned buffer by then is what arrives.

    waited: numbers of the copies that were waited for.
    """

    def __init__(self) -> None:
        self.waited: list[int] = []
        self._n_copies = 0

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], Any], after: Sequence[Event] = ()
    ) -> tuple[Any, Event]:
        number, self._n_copies = self._n_copies, self._n_copies + 1
        link = self

        class Late:
            def wait(self) -> None:
                link.waited.append(number)
                compute()

        return compute(), Late()

    def host_buffer(self, n_bytes: int) -> Tensor:
        return torch.zeros(n_bytes, dtype=torch.uint8)


def test_the_weights_arrive_as_they_were(weights: ModelWeights) -> None:
    machine = EmulatedMachine()
    source = PinnedBlocks(BLOCKS, weights, machine.gpu, machine.link)
    stream = WeightStream(source, range(len(BLOCKS)), AtOnce())
    for use in range(3 * len(BLOCKS)):
        block = use % len(BLOCKS)
        found, event = stream.use(block)
        assert same(found, block_weights(BLOCKS[block], weights))
        assert all(offset % 256 == 0 for offset in offsets(found))  # kernels need multiples of 16
        stream.done(block, machine.on_gpu("block", 1, [event]))
    stream.close()


def test_a_copy_in_pieces_is_whole(weights: ModelWeights) -> None:
    machine = EmulatedMachine()
    source = PinnedBlocks(BLOCKS, weights, machine.gpu, machine.link, piece_bytes=1000)
    assert same(source.fetch(1, 0, ())[0], block_weights(BLOCKS[1], weights))


def test_a_pinned_buffer_is_filled_anew_only_after_its_copy(weights: ModelWeights) -> None:
    link: Any = LateLink()
    source = PinnedBlocks(BLOCKS, weights, EmulatedMachine().gpu, link)
    fetched = []
    for number in range(2 * N_PINNED):
        assert link.waited == list(range(max(0, number - N_PINNED)))
        fetched.append(source.fetch(number % len(BLOCKS), number % 2, ()))
    for number, (found, event) in list(enumerate(fetched))[-N_PINNED:]:
        event.wait()
        assert same(found, block_weights(BLOCKS[number % len(BLOCKS)], weights))


def test_one_object_for_each_block_and_buffer(weights: ModelWeights) -> None:
    """What is made of it for the kernels can be kept."""
    machine = EmulatedMachine()
    source = PinnedBlocks(BLOCKS, weights, machine.gpu, machine.link)
    first, again, other = (source.fetch(0, buffer, ())[0] for buffer in (0, 0, 1))
    assert first is again and first is not other


def test_an_emulated_gpu_reads_what_is_mapped_and_pays_for_the_copy(weights: ModelWeights) -> None:
    machine = EmulatedMachine()
    source = MappedBlocks(BLOCKS, weights, machine.link)
    found, _ = source.fetch(2, 0, [machine.on_gpu("before")])
    n_bytes = block_weights(BLOCKS[2], weights).n_bytes
    assert found.matrices[f"{BLOCKS[2].name}.qkv"] is weights.matrices[f"{BLOCKS[2].name}.qkv"]
    assert machine.rows()[-1] == ("to_gpu", BLOCKS[2].name, 1, 1 + 0.5 + n_bytes / 64)
    assert source.fetch(2, 1, ())[0] is found


@pytest.mark.parametrize("n", [1, 2])
def test_no_memory_for_the_device_buffers(weights: ModelWeights, n: int) -> None:
    machine = EmulatedMachine()
    with pytest.raises(DeviceMemoryError):
        PinnedBlocks(BLOCKS, weights, FaultyDevice(machine.gpu, Fault(n, no_memory)), machine.link)


def test_a_failed_copy_does_not_lose_a_pinned_buffer(weights: ModelWeights) -> None:
    machine = EmulatedMachine()
    link = FaultyLink(machine.link, Fault(2, no_memory, only_once=True))
    source = PinnedBlocks(BLOCKS, weights, machine.gpu, link)
    source.fetch(0, 0, ())
    with pytest.raises(DeviceMemoryError):
        source.fetch(1, 1, ())
    for number in range(2 * N_PINNED):
        block = number % len(BLOCKS)
        assert same(source.fetch(block, number % 2, ())[0], block_weights(BLOCKS[block], weights))
