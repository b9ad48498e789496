"""Ask the system to read parts of a mapped file before they are used.

Kernels that touch pages one after the other wait for each small read of the disk. This requests a whole matrix at once.
"""

import ctypes
import mmap
from functools import cache
from typing import Any


def read_ahead(rows: Any, first: int, end: int) -> None:
    """Begin to read the rows from first to end of an array that may be mapped from a file, without waiting for them.

    This is only advice: where the system doesn't take it, pages are read when they are used.
    """
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    address, n_bytes = rows.ctypes.data + first * rows.strides[0], (end - first) * rows.strides[0]
    before = address % mmap.PAGESIZE
    libc().madvise(ctypes.c_void_p(address - before), ctypes.c_size_t(n_bytes + before), mmap.MADV_WILLNEED)


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, which is loaded already."""
    return ctypes.CDLL(None)
