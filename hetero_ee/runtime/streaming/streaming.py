"""Streams blocks: while one is computed, the next ones are copied into other buffers."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Protocol

from hetero_ee.runtime.devices.device import Event
from hetero_ee.weights.model_weights import ModelWeights

N_BUFFERS = 2  # on the device: one is read while the other is filled


class BlockSource(Protocol):
    """Numbered blocks in CPU memory, and device buffers large enough for any of them."""

    n_buffers: int

    def fetch(self, block: int, buffer: int, after: Sequence[Event]) -> tuple[ModelWeights, Event]:
        """Begin to copy a block into a device buffer after the events. Calls must not overlap.

        Returns:
            The block's tensors in the buffer, and the event of the copy.

        Raises:
            DeviceMemoryError, DeviceLostError: see Device.run.
        """
        ...

    def close(self) -> None: ...


class AtOnce(Executor):
    """A concurrent.futures executor that runs jobs in the caller's thread."""

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        """Run the job now and return a future with its result or error."""
        future: Future[Any] = Future()
        try:
            future.set_result(job(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True, slots=True)
class _Copy:
    """A block that is being copied to a buffer."""

    block: int
    buffer: int
    fetched: "Future[Any]"


class WeightStream:
    """Copies blocks to a device in a fixed order, repeatedly: after prefetch(), call use() and done() for each block.

    Args:
        worker: one thread that fetches blocks, so that copying from mapped to pinned memory delays nothing else.
        count: called with the number of each block whose copy begins.
    """

    def __init__(
        self,
        source: BlockSource,
        order: Sequence[int],
        worker: Executor,
        count: Callable[[int], None] = lambda block: None,
    ) -> None:
        if not order:
            raise ValueError("a stream needs at least one block.")
        self._source, self._order, self._worker, self._count = source, tuple(order), worker, count
        self._ahead: deque[_Copy] = deque()
        self._in_use: deque[_Copy] = deque()
        self._free: deque[tuple[int, tuple[Event, ...]]] = deque((buffer, ()) for buffer in range(source.n_buffers))
        self._next = 0
        self._n_allowed = math.inf

    @property
    def next_block(self) -> int:
        """Number of the block that use() expects next."""
        return self._ahead[0].block if self._ahead else self._order[self._next]

    def allow(self, n_blocks: int) -> None:
        """Limit copies to n_blocks, including those that have begun, until the next call of allow()."""
        self._n_allowed = n_blocks - len(self._ahead)

    def prefetch(self) -> None:
        """Begin to copy the next allowed blocks to all buffers that are free, or will be free after known events."""
        while self._free and self._n_allowed > 0:
            self._n_allowed -= 1
            buffer, after = self._free.popleft()
            block = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            self._count(block)
            fetched = self._worker.submit(self._source.fetch, block, buffer, after)
            self._ahead.append(_Copy(block, buffer, fetched))

    def use(self, block: int) -> tuple[ModelWeights, Event]:
        """Return the block's tensors on the device and the event of their copy. The caller must then call done().

        Raises:
            ValueError: if the block is not the next one, or no buffer is left for it.
            DeviceMemoryError, DeviceLostError: from the source. The caller must then call restart().
        """
        self.prefetch()
        if not self._ahead or self._ahead[0].block != block:
            expected = f"{self._ahead[0].block} is next" if self._ahead else f"{self._in_use[0].block} is in use"
            raise ValueError(f"block {block} was asked for while block {expected}.")
        found: tuple[ModelWeights, Event] = self._ahead[0].fetched.result()
        self._in_use.append(self._ahead.popleft())
        return found

    def done(self, block: int, event: Event) -> None:
        """Release a block's buffer, which nothing reads after `event`. Blocks are released in the order of use()."""
        if not self._in_use or self._in_use[0].block != block:
            raise ValueError(f"block {block} is not the one in use for longest.")
        self._free.append((self._in_use.popleft().buffer, (event,)))
        self.prefetch()

    def restart(self, after: Event, order: Sequence[int] | None = None) -> None:
        """Begin again with the first block, discarding blocks that are in use or were copied ahead.

        New copies begin with the next prefetch() or use(). The link runs them after those that have begun.

        Args:
            after: event after which nothing reads the buffers.
            order: a new order of blocks; None keeps the present one.
        """
        for copy in self._ahead:
            copy.fetched.exception()  # wait until the worker has begun it or failed
        self._order, self._n_allowed = self._order if order is None else tuple(order), math.inf
        self._free = deque((buffer, (after,)) for buffer in range(self._source.n_buffers))
        self._ahead.clear()
        self._in_use.clear()
        self._next = 0

    def close(self) -> None:
        """Wait for copies that have begun, then free the buffers."""
        self._worker.shutdown(wait=True)
        for copy in self._ahead:
            if copy.fetched.exception() is None:
                copy.fetched.result()[1].wait()
        self._source.close()
