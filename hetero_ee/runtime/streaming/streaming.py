"""Streamed blocks: the copy of the next ones runs under the compute of this one, in alternating buffers."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Protocol

from hetero_ee.runtime.devices.device import Event
from hetero_ee.weights.model_weights import ModelWeights

N_BUFFERS = 2  # on the device: one is computed from while the other is filled


class BlockSource(Protocol):
    """Blocks by number, in memory of the CPU, and device buffers for the largest of them."""

    n_buffers: int

    def fetch(self, block: int, buffer: int, after: Sequence[Event]) -> tuple[ModelWeights, Event]:
        """Begins the copy of the block into that buffer after the events: its tensors there, and the copy's event.

        Calls come one at a time. Raises DeviceMemoryError, DeviceLostError.
        """
        ...

    def close(self) -> None:
        """Gives the buffers' memory back."""
        ...


class AtOnce(Executor):
    """Runs jobs in the caller's thread."""

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        """The job is over when this returns; its error waits in the future."""
        future: Future[Any] = Future()
        try:
            future.set_result(job(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True, slots=True)
class _Copy:
    """A block on its way to a buffer."""

    block: int
    buffer: int
    fetched: "Future[Any]"


class WeightStream:
    """Blocks in a fixed order, again and again: prefetch() begins, then use() and done() for each block alternately.

    worker: the one thread where blocks are fetched, so that copying from mapped to pinned memory keeps nobody waiting.
    count: told each block whose copy begins.
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
        """The first that is on its way or, where none is, in line."""
        return self._ahead[0].block if self._ahead else self._order[self._next]

    def allow(self, n_blocks: int) -> None:
        """Until this is called again, no copies begin but of so many blocks, those on their way among them."""
        self._n_allowed = n_blocks - len(self._ahead)

    def prefetch(self) -> None:
        """Begins to copy the next blocks in order to all buffers that are free, or will be after known events, as far
        as they are allowed."""
        while self._free and self._n_allowed > 0:
            self._n_allowed -= 1
            buffer, after = self._free.popleft()
            block = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            self._count(block)
            fetched = self._worker.submit(self._source.fetch, block, buffer, after)
            self._ahead.append(_Copy(block, buffer, fetched))

    def use(self, block: int) -> tuple[ModelWeights, Event]:
        """The next block's tensors on the device, and the event after which they are there; then done() is owed.

        Raises what the source raised, and ValueError where the order is another or no buffer is left for it; after
        the former restart() is owed.
        """
        self.prefetch()
        if not self._ahead or self._ahead[0].block != block:
            expected = f"{self._ahead[0].block} is next" if self._ahead else f"{self._in_use[0].block} is in use"
            raise ValueError(f"block {block} was asked for while block {expected}.")
        found: tuple[ModelWeights, Event] = self._ahead[0].fetched.result()
        self._in_use.append(self._ahead.popleft())
        return found

    def done(self, block: int, event: Event) -> None:
        """Nothing reads the block after this event: its buffer is filled again from there. In the order of use()."""
        if not self._in_use or self._in_use[0].block != block:
            raise ValueError(f"block {block} is not the one in use for longest.")
        self._free.append((self._in_use.popleft().buffer, (event,)))
        self.prefetch()

    def restart(self, after: Event, order: Sequence[int] | None = None) -> None:
        """Begins again with the first block, whatever was in use or ahead; nothing reads the buffers after the event.

        order: another one from now on. Copies follow with the next prefetch() or use(); those on their way come first,
        as the link keeps its order.
        """
        for copy in self._ahead:
            copy.fetched.exception()  # waits until the worker has begun it, or has failed to
        self._order, self._n_allowed = self._order if order is None else tuple(order), math.inf
        self._free = deque((buffer, (after,)) for buffer in range(self._source.n_buffers))
        self._ahead.clear()
        self._in_use.clear()
        self._next = 0

    def close(self) -> None:
        """Waits until nothing is on its way, then gives the memory back."""
        self._worker.shutdown(wait=True)
        for copy in self._ahead:
            if copy.fetched.exception() is None:
                copy.fetched.result()[1].wait()
        self._source.close()
