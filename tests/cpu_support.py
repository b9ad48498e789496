"""What the tests of CPU operations share: guarded outputs, thread pools of threads, exact comparison."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

GUARD_BYTES, GUARD = 256, 0xA5


class Guarded:
    """An output array with bytes before and after it that nobody may write."""

    def __init__(self, shape: int | tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._bytes = np.full(size + 2 * GUARD_BYTES, GUARD, np.uint8)
        self.array = self._bytes[GUARD_BYTES : GUARD_BYTES + size].view(dtype).reshape(shape)

    def check(self) -> None:
        assert (self._bytes[:GUARD_BYTES] == GUARD).all(), "bytes before the output were written"
        assert (self._bytes[self._bytes.size - GUARD_BYTES :] == GUARD).all(), "bytes after the output were written"


class GuardedAllocations:
    """In place of np.empty: what an operation allocates by itself, guarded."""

    def __init__(self) -> None:
        self.arrays: list[Guarded] = []

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.arrays.append(Guarded(shape, dtype))
        return self.arrays[-1].array

    def check(self) -> None:
        for each in self.arrays:
            each.check()


def guarded_copy(values: Any) -> Guarded:
    """A guarded array that starts with these values, for operations in place."""
    guarded = Guarded(values.shape, values.dtype)
    guarded.array[...] = values
    return guarded


def assert_same_bits(first: Any, second: Any) -> None:
    assert first.dtype == second.dtype and first.shape == second.shape
    assert np.ascontiguousarray(first).tobytes() == np.ascontiguousarray(second).tobytes()


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Largest error over the largest expected magnitude."""
    error = np.abs(found.astype(np.float64) - expected).max(initial=0.0)
    assert error <= tolerance * max(np.abs(expected).max(initial=0.0), 1e-30), error


@contextmanager
def teams() -> Iterator[list[ThreadPool]]:
    """Teams of one, two and three threads."""
    made = [ThreadPool(count) for count in (1, 2, 3)]
    try:
        yield made
    finally:
        for pool in made:
            pool.close()
