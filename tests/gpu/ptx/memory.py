"""Global memory of an emulated launch. Tensors are not copied: device addresses, with gaps, map to host memory."""

import ctypes
from typing import Any

import numpy as np

from tests.gpu.ptx.arithmetic import U8, UNSIGNED

BASE = 1 << 36  # device address of index 0
GAP_BYTES = 512  # unmapped bytes between tensors, so that accesses outside a tensor are found
SECTOR_BYTES = 32
HOST_BASE = 1 << 12  # host address of the first byte of _host()


class GlobalMemory:
    """Global memory that consists of the given tensors.

    Device addresses have the alignment of the host addresses, up to 256 bytes. Gaps between the elements of a strided
    tensor belong to the tensor. Tensors that overlap share a region.

    Attributes:
        is_touched: whether each sector was read or written.
    """

    def __init__(self, tensors: list[Any]) -> None:
        spans = _merged(sorted((t.data_ptr(), t.data_ptr() + _span_bytes(t)) for t in tensors))
        at, starts = GAP_BYTES, []
        for low, high in spans:
            starts.append(-(-at // 256) * 256 + low % 256)
            at = starts[-1] + high - low + GAP_BYTES
        self.n_bytes = -(-at // 256) * 256 + 256
        self.is_touched = np.zeros(self.n_bytes // SECTOR_BYTES, bool)
        lows, highs = np.array(spans, np.int64).reshape(-1, 2).T
        self._starts = np.array(starts, np.int64)  # device index (address - BASE) of each region's first byte
        self._shifts = lows - self._starts
        self._ends = highs - self._shifts

    def address(self, pointer: int) -> int:
        """Return the device address for a host address. Empty tensors get an address that must not be accessed."""
        found = pointer - self._shifts
        inside = (self._starts <= found) & (found < self._ends)
        return BASE + int(found[inside][0]) if inside.any() else BASE

    def contains(self, index: Any, n_bytes: int) -> Any:
        """Return whether the n_bytes from each index are in one region."""
        region = self._region(index)
        return (region >= 0) & (index + n_bytes <= np.append(self._ends, 0)[region])

    def read(self, index: Any, size: int, n: int) -> list[Any]:
        """Return n adjacent words of `size` bytes for each index."""
        words, first = self._words(index, size)
        return [words[first + i] for i in range(n)]

    def write(self, index: Any, size: int, values: Any) -> None:
        words, first = self._words(index, size)
        for i, value in enumerate(values):
            words[first + i] = value

    def _words(self, index: Any, size: int) -> tuple[Any, Any]:
        """Return the host's memory as words, and the position of each index in it."""
        host = np.frombuffer((ctypes.c_uint8 * (1 << 47)).from_address(HOST_BASE), U8)
        return host.view(UNSIGNED[8 * size]), (index + self._shifts[self._region(index)] - HOST_BASE) // size

    def _region(self, index: Any) -> Any:
        return np.searchsorted(self._starts, index, "right") - 1


def _merged(spans: list[tuple[int, int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for low, high in spans:
        if merged and low < merged[-1][1]:
            merged[-1][1] = max(high, merged[-1][1])
        else:
            merged.append([low, high])
    return merged


def _span_bytes(tensor: Any) -> int:
    if not tensor.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())
