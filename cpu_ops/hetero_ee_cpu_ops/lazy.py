"""Functions compiled at their first use for exactly one signature, and cached on disk.

A fixed signature makes the compiled dispatcher check dtypes, dimensions and contiguity (0.3 us for five arrays, where
asking NumPy takes 0.1 us for each question); shapes are checked in the compiled code, which returns a status.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.kernel_files import compiled, compiled_chunk

NO_ARGUMENTS = np.zeros(0, np.int64)  # an entry given this computes what is not worth sharing, and says what is


def array_in(element: Any, dimensions: int) -> Any:
    """Type of an argument that is only read: C-contiguous, aligned, writable or not."""
    return types.Array(element, dimensions, "C", readonly=True)


def array_out(element: Any, dimensions: int) -> Any:
    """Type of an argument that is written: C-contiguous, aligned."""
    return types.Array(element, dimensions, "C")


class Entry:
    """A function called from Python. Holds the interpreter's lock unless `nogil`: releasing it for a few microseconds
    of work invites another thread to keep it for milliseconds."""

    __slots__ = ("_compiled", "_function", "_nogil", "_signature")

    def __init__(self, function: Callable[..., int], signature: Any, *, nogil: bool = False) -> None:
        self._function, self._signature, self._nogil = function, signature, nogil
        self._compiled: Any = None

    def __call__(self, *arguments: Any) -> int:
        """Raises ValueError where an array's dtype, dimensions or layout differ from the signature's."""
        if self._compiled is None:
            self._compiled = compiled(self._function, signature=self._signature, nogil=self._nogil)
        try:
            return self._compiled(*arguments)
        except TypeError:
            given = ", ".join(_described(argument) for argument in arguments)
            raise ValueError(f"arguments ({given}) don't fit {self._signature}.") from None


class Chunk:
    """A void(address of int64 arguments, chunk index), for ThreadPool.run or atomics.call_chunk."""

    __slots__ = ("_address", "_compiled", "_compiling", "_function")

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self._function, self._address = function, 0
        self._compiled: Any = None  # owns the code at the address
        self._compiling = Lock()

    @property
    def address(self) -> int:
        if self._address == 0:
            with self._compiling:  # the first caller's code must not be replaced while it runs
                if self._address == 0:
                    self._compiled = compiled_chunk(self._function)
                    self._address = int(self._compiled.address)
        return self._address


def entry(signature: Any, *, nogil: bool = False) -> Callable[[Callable[..., int]], Entry]:
    return lambda function: Entry(function, signature, nogil=nogil)


def _described(argument: Any) -> str:
    dtype = getattr(argument, "dtype", None)
    return type(argument).__name__ if dtype is None else f"{dtype}{list(argument.shape)}"
