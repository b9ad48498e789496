"""Functions that are compiled at first use, for one fixed signature, and cached on disk.

With a fixed signature the compiled dispatcher checks dtypes, dimensions and contiguity (0.3 us for five arrays; asking
NumPy costs 0.1 us per question). The compiled code checks shapes and returns a status.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from numba import types

from hetero_ee_cpu_ops.jit.kernel_files import compiled, compiled_chunk

NO_ARGUMENTS = np.zeros(0, np.int64)  # makes an entry compute small work itself, or return the chunks to share


def array_in(element: Any, dimensions: int) -> Any:
    """Return the Numba type of an array argument that is only read: C-contiguous and aligned."""
    return types.Array(element, dimensions, "C", readonly=True)


def array_out(element: Any, dimensions: int) -> Any:
    """Return the Numba type of an array argument that is written: C-contiguous and aligned."""
    return types.Array(element, dimensions, "C")


class Entry:
    """A compiled function that Python calls.

    It keeps the GIL unless `nogil` is set, because another Python thread could otherwise take it for milliseconds.
    """

    __slots__ = ("_compiled", "_compiling", "_function", "_nogil", "_signature")

    def __init__(self, function: Callable[..., int], signature: Any, *, nogil: bool = False) -> None:
        self._function, self._signature, self._nogil = function, signature, nogil
        self._compiled: Any = None
        self._compiling = Lock()

    def __call__(self, *arguments: Any) -> int:
        """Call the function. Raises: ValueError: if an array's dtype, dimensions or layout is not the signature's."""
        if self._compiled is None:
            with self._compiling:
                self._compiled = self._compiled or compiled(
                    self._function, signature=self._signature, nogil=self._nogil
                )
        try:
            return self._compiled(*arguments)
        except TypeError:
            given = ", ".join(_described(argument) for argument in arguments)
            raise ValueError(f"Arguments ({given}) do not match the signature {self._signature}.") from None


class Chunk:
    """A function (address of int64 arguments, chunk index), compiled at first use, for ThreadPool.run."""

    __slots__ = ("_address", "_compiled", "_compiling", "_function")

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self._function, self._address = function, 0
        self._compiled: Any = None  # keeps the code at the address alive
        self._compiling = Lock()

    @property
    def address(self) -> int:
        if self._address == 0:
            with self._compiling:  # a second compilation would free code that the first caller may be running
                if self._address == 0:
                    self._compiled = compiled_chunk(self._function)
                    self._address = int(self._compiled.address)
        return self._address


def entry(signature: Any, *, nogil: bool = False) -> Callable[[Callable[..., int]], Entry]:
    return lambda function: Entry(function, signature, nogil=nogil)


def _described(argument: Any) -> str:
    dtype = getattr(argument, "dtype", None)
    return type(argument).__name__ if dtype is None else f"{dtype}{list(argument.shape)}"
