"""A small pool of threads that share an operation's chunks.

Chunks are claimed one by one, and completion is counted in chunks, not in workers: a worker that the system has
descheduled delays nothing but a chunk it holds. (A barrier that waits for every worker costs up to 8 ms when a core is
busy.) Workers spin for a moment after their last chunk, since a decoder's operations follow each other within
microseconds. Then they sleep until woken; the caller never waits for them to wake.

The ticket is one 64-bit word, epoch | number of chunks | next claim: a claim succeeds only for the operation it was
read from, and the operation's arguments stay untouched until all of its claimed chunks are done.
"""

import os
import threading
from typing import Any

import numpy as np

from hetero_ee_cpu_ops.jit.atomics import add, call_chunk, load_acquire, pause, replace, store_release
from hetero_ee_cpu_ops.jit.kernel_files import compiled, inner

COUNT_BITS = 20
MAX_CHUNKS = 2**COUNT_BITS - 1
MASK = MAX_CHUNKS
# Byte offsets in the shared array; each word that workers write has a cache line (64 bytes) of its own.
TICKET, DONE, FUNCTION, ARGUMENTS, N_STREAMS, STOP = 0, 64, 128, 136, 144, 192
SPINS = 100_000  # 1 to 4 ms of `pause`: longer than a small model's gap between two shared operations
JOIN_S = 0.05  # time after which close() wakes a worker again that still sleeps


@inner
def chunk_of(claim: int, n_chunks: int, n_streams: int) -> int:
    """Return the chunk that a claim runs, so that n_streams threads with alternating claims each get neighbours.

    A thread then has already prefetched the beginning of its next chunk: with two threads SmolLM2-135M writes 7 to 12 %
    more tokens per second than with chunks in the order of claims (Zen 4, 2026-11-28).
    """
    stream, n_each, rest = claim % n_streams, n_chunks // n_streams, n_chunks % n_streams
    return stream * n_each + min(stream, rest) + claim // n_streams


@inner
def _claim_and_run(shared: int) -> bool:
    """Run the next chunk if one is left; return whether it did."""
    ticket = load_acquire(shared + TICKET)
    index, n_chunks = ticket & MASK, (ticket >> COUNT_BITS) & MASK
    if index >= n_chunks or not replace(shared + TICKET, ticket, ticket + 1):
        return False
    chunk = chunk_of(index, n_chunks, load_acquire(shared + N_STREAMS))
    call_chunk(load_acquire(shared + FUNCTION), load_acquire(shared + ARGUMENTS), chunk)
    add(shared + DONE, 1)
    return True


@compiled(nogil=True)
def _work(shared: int) -> None:
    """Run chunks until none has been available for SPINS pauses."""
    spins = 0
    while spins < SPINS and load_acquire(shared + STOP) == 0:
        if _claim_and_run(shared):
            spins = 0
        else:
            pause()
            spins += 1


@compiled(nogil=True)
def lead(shared: int, function: int, arguments: int, n_chunks: int) -> None:
    """Publish an operation, take part in it, and return when all chunks are done. Work alone if shared is 0."""
    if shared == 0 or n_chunks == 1:
        for index in range(n_chunks):
            call_chunk(function, arguments, index)
        return
    ticket = load_acquire(shared + TICKET)
    store_release(shared + FUNCTION, function)
    store_release(shared + ARGUMENTS, arguments)
    store_release(shared + DONE, 0)
    epoch = (ticket >> (2 * COUNT_BITS)) + 1
    store_release(shared + TICKET, (epoch & MASK) << (2 * COUNT_BITS) | n_chunks << COUNT_BITS)
    while load_acquire(shared + TICKET) & MASK < n_chunks:
        _claim_and_run(shared)
    while load_acquire(shared + DONE) < n_chunks:
        pause()


class ThreadPool:
    """A pool of n_threads threads, including the caller's. Several threads may call `run`; close() ends the workers."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._memory = np.zeros(64, np.int64)
        self._shared = (self._memory.ctypes.data + 63) & ~63  # aligned to a cache line
        self._memory[(self._shared - self._memory.ctypes.data + N_STREAMS) // 8] = n_threads
        # Reentrant, since Ctrl-C between enter() and the caller's try leaves the lock taken for good.
        self._lock = threading.RLock()
        self._wake = threading.Semaphore(0)
        self._asleep = 0
        self._asleep_lock = threading.Lock()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    def run(self, function: int, arguments: Any, n_chunks: int) -> None:
        """Call function(address of arguments, i) for every i < n_chunks; return when all are done.

        If another thread is using the pool, the calling thread computes everything itself.

        Args:
            function: address of a compiled void(intp, intp) that may run in any thread.
            arguments: int64 array, which must not change meanwhile.
        """
        address = arguments.ctypes.data
        shared = self.enter() if n_chunks > 1 else 0
        try:
            lead(shared, function, address, n_chunks)
        finally:
            self.leave(shared)

    def enter(self) -> int:
        """Reserve the pool until leave(). Return its address for lead(), or 0 if the caller must compute alone."""
        if self.n_threads == 1 or not self._lock.acquire(blocking=False):
            return 0
        if not self._threads or self._asleep:
            self._wake_workers()
        return self._shared

    def leave(self, shared: int) -> None:
        if shared:
            self._lock.release()

    def close(self) -> None:
        """End the workers. Later calls of `run` use only the calling thread."""
        with self._lock:
            self._stopping = True
            self._memory[(self._shared - self._memory.ctypes.data + STOP) // 8] = 1
            for thread in self._threads:
                while thread.is_alive():  # Ctrl-C inside release() may leave a waiter that takes a later one
                    self._wake.release()
                    thread.join(JOIN_S)
            self._threads, self.n_threads = [], 1

    def _wake_workers(self) -> None:
        """Start the workers at first use; later wake those that sleep."""
        if os.getpid() != self._process:  # a forked child has no workers
            self.n_threads = 1
            return
        if not self._threads:
            for number in range(1, self.n_threads):
                thread = threading.Thread(target=self._live, name=f"hetero-ee-{number}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system refuses more threads; the others compute all chunks
                    break
                self._threads.append(thread)
            self.n_threads = 1 + len(self._threads)
            return
        with self._asleep_lock:
            sleeping, self._asleep = self._asleep, 0
        for _ in range(sleeping):
            self._wake.release()

    def _live(self) -> None:
        while not self._stopping:
            _work(self._shared)
            with self._asleep_lock:
                self._asleep += 1
            self._wake.acquire()
