"""The thread pool of threads: every chunk once, whoever calls and however the workers sleep."""

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from numba import cfunc, types

from hetero_ee_cpu_ops.jit.atomics import add
from hetero_ee_cpu_ops.jit.thread_pool import SPINS, ThreadPool, chunk_of
from hetero_ee_cpu_ops.simd.bytes import word


@pytest.fixture(scope="module")
def count() -> Any:
    """A chunk function that adds one to its own place of an array, after a little work."""

    @cfunc(types.void(types.intp, types.intp))
    def chunk(arguments: int, index: int) -> None:
        total = 0.0
        for step in range(200):
            total += step * 0.5
        add(word(arguments, 0) + 8 * index, 1 if total > 0 else 2)

    return chunk


def arguments_for(counts: Any) -> Any:
    return np.array([counts.ctypes.data], np.int64)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_chunk_runs_once(count: Any, threads: int) -> None:
    pool, counts = ThreadPool(threads), np.zeros(1000, np.int64)
    for n_chunks in (1, 2, 7, 1000):
        for _ in range(20):
            pool.run(count.address, arguments_for(counts), n_chunks)
    pool.close()
    assert list(counts[[0, 1, 2, 6, 7, 999]]) == [80, 60, 40, 40, 20, 20]


@pytest.mark.parametrize("n_streams", [1, 2, 3, 5])
def test_alternating_claims_give_each_thread_neighbouring_chunks(n_streams: int) -> None:
    for n_chunks in range(1, 20):
        order = [chunk_of.py_func(claim, n_chunks, n_streams) for claim in range(n_chunks)]
        streams = [order[first::n_streams] for first in range(n_streams)]
        assert [chunk for stream in streams for chunk in stream] == list(range(n_chunks))


def test_sleeping_workers_do_not_hold_up_a_caller(count: Any) -> None:
    pool, counts = ThreadPool(3), np.zeros(100, np.int64)
    for _ in range(5):
        pool.run(count.address, arguments_for(counts), 100)
        time.sleep(0.02)  # longer than they spin
    assert SPINS > 0 and (counts == 5).all()
    pool.close()


def test_several_python_threads_may_call(count: Any) -> None:
    pool, results = ThreadPool(2), [np.zeros(50, np.int64) for _ in range(4)]

    def calls(counts: Any) -> None:
        for _ in range(200):
            pool.run(count.address, arguments_for(counts), 50)

    threads = [threading.Thread(target=calls, args=(counts,)) for counts in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert all((counts == 200).all() for counts in results)


def test_an_interrupted_call_leaves_the_team_usable(count: Any) -> None:
    """Ctrl-C may come when the thread pool is taken and nothing yet sees to its release."""
    pool, counts = ThreadPool(2), np.zeros(10, np.int64)
    pool.enter()
    pool.run(count.address, arguments_for(counts), 10)
    assert pool.enter() != 0 and (counts == 1).all()
    pool.close()
    pool.run(count.address, arguments_for(counts), 10)
    assert (counts == 2).all()


def test_a_closed_team_still_computes(count: Any) -> None:
    before = threading.active_count()
    pool, counts = ThreadPool(2), np.zeros(10, np.int64)
    pool.run(count.address, arguments_for(counts), 10)
    assert threading.active_count() == before + 1
    pool.close()
    pool.close()
    assert threading.active_count() == before
    pool.run(count.address, arguments_for(counts), 10)
    assert (counts == 2).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_alone(count: Any) -> None:
    """Threads don't survive a fork; completion is counted in chunks, so the child is merely slower."""
    pool, counts = ThreadPool(2), np.zeros(10, np.int64)
    pool.run(count.address, arguments_for(counts), 10)
    child = os.fork()
    if child == 0:
        pool.run(count.address, arguments_for(counts), 10)
        os._exit(0 if (counts == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


@pytest.mark.parametrize("n_given", [0, 1])
def test_threads_that_the_system_refuses_are_done_without(
    count: Any, monkeypatch: pytest.MonkeyPatch, n_given: int
) -> None:
    left, start = [n_given], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool, counts = ThreadPool(4), np.zeros(50, np.int64)
    pool.run(count.address, arguments_for(counts), 50)
    assert (counts == 1).all() and pool.n_threads == 1 + n_given
    pool.close()


def test_a_waiter_that_an_interrupted_wake_left_does_not_hold_up_close(count: Any) -> None:
    """Ctrl-C inside Condition.notify, between a waiter's release and its removal, leaves it to take a later one."""
    pool, counts = ThreadPool(2), np.zeros(10, np.int64)
    pool.run(count.address, arguments_for(counts), 10)
    waiters: Any = pool._wake._cond._waiters  # type: ignore[attr-defined]
    while not waiters:  # until the worker sleeps
        time.sleep(0.001)
    left = threading.Lock()
    left.acquire()
    waiters.appendleft(left)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
