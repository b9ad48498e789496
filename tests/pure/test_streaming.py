"""Streamed weights: what overlaps, who waits, and that no buffer is written while it is read."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.errors import DeviceLostError
from hetero_ee.runtime.devices.device import CPU, GPU, Event, Link
from hetero_ee.runtime.devices.timeline import TO_GPU
from hetero_ee.runtime.streaming.streaming import AtOnce, WeightStream
from tests.device_support import EmulatedMachine, Fault, FaultyLink


class Source:
    """Blocks of given sizes. contents: what was copied into each buffer last."""

    def __init__(self, link: Link, sizes: Sequence[int], n_buffers: int = 2) -> None:
        self._link, self._sizes, self.n_buffers = link, sizes, n_buffers
        self.contents: list[int | None] = [None] * n_buffers
        self.fetched: list[tuple[int, int, Event]] = []
        self.is_closed = False

    def fetch(self, block: int, buffer: int, after: Sequence[Event]) -> tuple[int, Event]:
        found, event = self._link.copy(f"copy {block}", self._sizes[block], GPU, lambda: block, after)
        self.contents[buffer] = block
        self.fetched.append((block, buffer, event))
        return found, event

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def machine() -> EmulatedMachine:
    return EmulatedMachine()


def streamed(machine: EmulatedMachine, stream: WeightStream, block: int, size: int = 1) -> Event:
    found, event = stream.use(block)
    assert found == block
    done = machine.on_gpu(f"block {block}", size, [event])
    stream.done(block, done)
    return done


def test_compute_bound(machine: EmulatedMachine) -> None:
    """Copies take 1, blocks 2; a buffer is written again as soon as its block is computed."""
    stream = WeightStream(Source(machine.link, [32] * 4), range(4), AtOnce())
    for block in (0, 1, 2, 3, 0):
        streamed(machine, stream, block, 2)
    assert machine.rows() == [
        (TO_GPU, "copy 0", 0, 1),
        (TO_GPU, "copy 1", 1, 2),
        (GPU, "block 0", 1, 3),
        (TO_GPU, "copy 2", 3, 4),
        (GPU, "block 1", 3, 5),
        (TO_GPU, "copy 3", 5, 6),
        (GPU, "block 2", 5, 7),
        (TO_GPU, "copy 0", 7, 8),
        (GPU, "block 3", 7, 9),
        (TO_GPU, "copy 1", 9, 10),
        (GPU, "block 0", 9, 11),
        (TO_GPU, "copy 2", 11, 12),
    ]


def test_link_bound(machine: EmulatedMachine) -> None:
    """Copies take 3, blocks 1: the link never rests."""
    stream = WeightStream(Source(machine.link, [160] * 3), range(3), AtOnce())
    for block in (0, 1, 2, 0):
        streamed(machine, stream, block)
    assert [row for row in machine.rows() if row[0] == TO_GPU] == [
        (TO_GPU, f"copy {i % 3}", 3 * i, 3 * i + 3) for i in range(6)
    ]
    assert [row for row in machine.rows() if row[0] == GPU] == [
        (GPU, f"block {i % 3}", 3 * i + 3, 3 * i + 4) for i in range(4)
    ]


def test_copies_for_the_next_pass_run_under_the_cpu(machine: EmulatedMachine) -> None:
    """After the streamed blocks come 4 seconds of CPU: the next pass finds both its first blocks there."""
    stream = WeightStream(Source(machine.link, [96, 96]), range(2), AtOnce())
    for _ in range(2):
        streamed(machine, stream, 0)
        last = streamed(machine, stream, 1)
        machine.on_cpu("rest", 1, [machine.transfer("out", CPU, [last])])
    assert [row for row in machine.rows() if row[0] in (GPU, CPU)] == [
        (GPU, "block 0", 2, 3),
        (GPU, "block 1", 4, 5),
        (CPU, "rest", 5.25, 9.25),
        (GPU, "block 0", 9.25, 10.25),
        (GPU, "block 1", 10.25, 11.25),
        (CPU, "rest", 11.5, 15.5),
    ]


def test_prefetching_begins_before_the_first_use(machine: EmulatedMachine) -> None:
    stream = WeightStream(Source(machine.link, [32, 32, 32]), range(3), AtOnce())
    stream.prefetch()
    machine.on_cpu("first layers")
    streamed(machine, stream, 0)
    assert machine.rows()[:4] == [
        (TO_GPU, "copy 0", 0, 1),
        (TO_GPU, "copy 1", 1, 2),
        (CPU, "first layers", 0, 4),
        (GPU, "block 0", 4, 5),
    ]


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    computes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    n_buffers=st.integers(1, 3),
    n_uses=st.integers(1, 12),
)
@settings(deadline=None)
def test_no_buffer_is_written_while_it_is_read(
    sizes: list[int], computes: list[int], n_buffers: int, n_uses: int
) -> None:
    machine = EmulatedMachine()
    source = Source(machine.link, sizes, n_buffers)
    stream = WeightStream(source, range(len(sizes)), AtOnce())
    for use in range(n_uses):
        streamed(machine, stream, use % len(sizes), computes[use % len(computes)])
    spans = machine.timeline.spans
    copies = [span for span in spans if span.lane == TO_GPU]
    reads = [span for span in spans if span.lane == GPU]
    buffers = [buffer for _, buffer, _ in source.fetched]
    for i, read in enumerate(reads):
        assert read.start_s >= copies[i].end_s
        later = [copies[j] for j in range(i + 1, len(copies)) if buffers[j] == buffers[i]]
        assert all(copy.start_s >= read.end_s for copy in later)


def test_two_blocks_may_be_in_use(machine: EmulatedMachine) -> None:
    """Attention and FFN of one layer, say; a third has no buffer until one of them is done."""
    source = Source(machine.link, [32] * 3)
    stream = WeightStream(source, range(3), AtOnce())
    assert stream.use(0)[0] == 0 and stream.use(1)[0] == 1
    with pytest.raises(ValueError, match="block 2 was asked for while block 0 is in use"):
        stream.use(2)
    assert source.contents == [0, 1]
    with pytest.raises(ValueError, match="block 1 is not the one in use for longest"):
        stream.done(1, machine.on_gpu("both"))
    stream.done(0, machine.on_gpu("both"))
    assert source.contents == [2, 1]
    assert stream.use(2)[0] == 2


def test_another_order_is_refused(machine: EmulatedMachine) -> None:
    stream = WeightStream(Source(machine.link, [32] * 3), (2, 0), AtOnce())
    with pytest.raises(ValueError, match="block 0 was asked for while block 2 is next"):
        stream.use(0)
    assert stream.use(2)[0] == 2
    with pytest.raises(ValueError, match="at least one block"):
        WeightStream(Source(machine.link, [32]), (), AtOnce())


def test_a_pass_that_was_given_up(machine: EmulatedMachine) -> None:
    """In its middle, one block in use and one ahead: the next pass begins at the first, in another order if wanted."""
    stream = WeightStream(Source(machine.link, [32] * 4), range(4), AtOnce())
    streamed(machine, stream, 0)
    stream.use(1)
    still_read = machine.on_gpu("block 1", 20)
    stream.restart(still_read)
    streamed(machine, stream, 0)
    assert machine.rows()[-3:] == [(TO_GPU, "copy 1", 23, 24), (GPU, "block 0", 23, 24), (TO_GPU, "copy 2", 24, 25)]
    stream.restart(machine.on_gpu("other"), (3, 1))
    for block in (3, 1, 3):
        streamed(machine, stream, block)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_copy_that_fails_is_told_where_its_block_is_used(machine: EmulatedMachine, n: int) -> None:
    source = Source(FaultyLink(machine.link, Fault(n, only_once=True)), [32] * 3)
    stream = WeightStream(source, range(3), AtOnce())
    for use in range(n - 1):
        streamed(machine, stream, use % 3)
    for _ in range(2):
        with pytest.raises(DeviceLostError):
            stream.use((n - 1) % 3)
    stream.restart(machine.on_gpu("what was begun"))
    for use in range(7):
        streamed(machine, stream, use % 3)


def test_fetching_on_a_worker_keeps_the_order_and_nobody_waiting(machine: EmulatedMachine) -> None:
    """The worker is held up: prefetching returns all the same, and each block comes out as itself."""
    held_up, threads = threading.Event(), set()

    class Slow(Source):
        def fetch(self, *arguments: Any) -> tuple[int, Event]:
            held_up.wait(10)
            threads.add(threading.current_thread())
            return super().fetch(*arguments)

    source = Slow(machine.link, [32] * 5)
    stream = WeightStream(source, range(5), ThreadPoolExecutor(1))
    stream.prefetch()
    assert source.fetched == []
    held_up.set()
    for use in range(20):
        streamed(machine, stream, use % 5)
    stream.close()
    assert threading.current_thread() not in threads and len(threads) == 1
    assert [block for block, *_ in source.fetched] == [i % 5 for i in range(22)]


def test_closing_waits_and_gives_back(machine: EmulatedMachine) -> None:
    source = Source(FaultyLink(machine.link, Fault(2)), [32] * 3)
    stream = WeightStream(source, range(3), ThreadPoolExecutor(1))
    stream.prefetch()
    stream.close()
    assert source.is_closed and len(source.fetched) == 1
    assert machine.timeline.now_s == 1  # the copy was waited for
