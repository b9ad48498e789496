"""Runs the streamed blocks of a plan: the GPU computes each from weights that were just copied.

Blocks are copied in the order of a pass. The first blocks of the next pass are copied while the present one ends. With
the placement "visit", an attention's KV cache is copied too, and new keys and values return to the CPU's cache. If
tokens may exit, copies run ahead only to layers that the pass is sure to reach.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from hetero_ee.costs.work import Work
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cache import KvCache
from hetero_ee.models.blocks import Block
from hetero_ee.planning.placement import Placement
from hetero_ee.planning.times.traffic import KV
from hetero_ee.runtime.devices.device import CPU, Event
from hetero_ee.runtime.devices.machine import Machine
from hetero_ee.runtime.route import DECODE, PREFILL, Route
from hetero_ee.runtime.streaming.streaming import N_BUFFERS, WeightStream
from hetero_ee.weights.model_weights import ModelWeights


class Borrowed(Protocol):
    """Callback that runs hidden states through one block on the GPU with these weights."""

    def __call__(self, block: Block, weights: ModelWeights, hidden: Tensor, batch: Batch, /) -> Tensor: ...


class WeightStreams:
    """Runs the streamed blocks of a plan.

    Args:
        blocks: every block that is streamed in some pass. Its index is its number in `stream`.
        compute: computes a streamed block.
        visit: computes an attention whose KV cache is on the CPU.
        kv_type: type of keys and values.
        exiting: if tokens may exit early, the blocks streamed when decoding, of which a pass may use only some.
    """

    def __init__(
        self,
        stream: WeightStream,
        blocks: Sequence[Block],
        machine: Machine,
        compute: Borrowed,
        visit: Borrowed,
        kv_type: str,
        exiting: Sequence[Block] = (),
    ) -> None:
        self._stream, self._machine = stream, machine
        self._numbers = {block.name: number for number, block in enumerate(blocks)}
        self._compute, self._visit, self._kv_type = compute, visit, kv_type
        self._cycle = tuple(self._numbers[block.name] for block in exiting)
        self._order: tuple[int, ...] | None = None
        self._n_left = 0  # blocks of the pass under way

    def begin(self, blocks: Sequence[Block]) -> None:
        """Announce a pass with these streamed blocks, whose copies begin unless they have begun already."""
        order = tuple(self._numbers[block.name] for block in blocks)
        if not order:
            return
        first = self._cycle.index(order[0]) if order[0] in self._cycle else 0
        is_part = bool(self._cycle) and order == self._cycle[first : first + len(order)]
        whole = self._cycle if is_part else order
        known, self._order = self._order, None  # until this ends: after a failure the stream has to restart
        continues = not is_part or self._stream.next_block == order[0]
        if whole != known or self._n_left or not continues:  # blocks are left over from a pass that failed
            self._restart((*whole[first:], *whole[:first]) if is_part else order)
        if is_part:  # the first blocks of the cycle wait for the next token that reaches them
            self._stream.allow(len(order) + (N_BUFFERS if order[-1] == whole[-1] else 0))
        self._stream.prefetch()
        self._order, self._n_left = whole, len(order)

    def run(
        self,
        block: Block,
        place: Placement,
        batch: Batch,
        hidden: Tensor,
        ready: Sequence[Event],
        work: Work,
    ) -> tuple[Tensor, Event]:
        """Run the batch through the pass's next block after the events `ready`. Return the states and their event."""
        gpu, link = self._machine.gpu, self._machine.link
        assert gpu is not None and link is not None, "only a GPU has weights streamed to it"
        number, order = self._numbers[block.name], self._order
        self._order = None  # until this ends: after a failure the stream has to restart
        visiting = block.state if place == Placement.VISIT else None
        compute = self._compute if visiting is None else self._visit
        weights, copied = self._stream.use(number)
        found, event = gpu.run([work], lambda: compute(block, weights, hidden, batch), (*ready, copied))
        self._stream.done(number, event)
        if visiting is not None:
            n_bytes = visiting.n_bytes(len(batch), self._kv_type)
            self._machine.traffic.moved(KV, n_bytes, to_gpu=False)
            link.copy(f"{block.name} back", n_bytes, CPU, lambda: None, (event,))
        self._order, self._n_left = order, self._n_left - 1
        return found, event

    def close(self) -> None:
        """Wait for copies that have begun, and free their buffers."""
        self._stream.close()

    def _restart(self, order: tuple[int, ...]) -> None:
        gpu = self._machine.gpu
        assert gpu is not None
        _, now = gpu.run([], lambda: None)
        self._stream.restart(now, order)


def streamed_blocks(route: Route, layers: range) -> list[Block]:
    """Return every block that decoding or prefill streams, in the order of a pass."""
    names = {
        block.name
        for kind in (DECODE, PREFILL)
        for segment in route.segments(kind, layers)
        if segment.is_streamed
        for block in segment.blocks
    }
    return [block for block in route.blocks if block.name in names]


def visiting_bytes(blocks: Sequence[Block], route: Route, cache: KvCache, kv_type: str) -> Callable[[int], int]:
    """Return a function of the block number: the bytes of state that are copied with it if it "visits" the GPU."""

    def n_bytes(number: int) -> int:
        block = blocks[number]
        state, layer = block.state, block.layer
        if state is None or layer is None or route.place(block, PREFILL) != Placement.VISIT:
            return 0
        return sum(state.n_bytes(cache.length_at(sequence, layer), kv_type) for sequence in cache.sequences)

    return n_bytes
