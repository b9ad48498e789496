"""Global memory of an emulated launch. Tensors are not copied: device addresses, with gaps, map to host memory."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gpu.ptx.arithmetic import U8, UNSIGNED

BASE = 1 << 36  # device address of index 0
GAP_BYTES = 512  # unmapped bytes between tensors, so that accesses outside a tensor are found
SECTOR_BYTES = 32


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of one tensor, or of several that overlap."""

    low: int  # first byte's host address; `high` is the end
    high: int
    at: int  # device index (address - BASE) of the first byte
    first: int  # device index of the first byte of `memory`
    memory: Any  # uint8 view of host memory, beginning up to 15 bytes before the tensor


class GlobalMemory:
    """Global memory that consists of the given tensors.

    Device addresses have the alignment of the host addresses, up to 256 bytes. Gaps between the elements of a strided
    tensor belong to the tensor.

    Attributes:
        is_touched: whether each sector was read or written.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self.regions: list[Region] = []
        at = GAP_BYTES
        for low, high in _merged(sorted((t.data_ptr(), t.data_ptr() + _span_bytes(t)) for t in tensors)):
            at = -(-at // 256) * 256 + low % 256
            first = low // 16 * 16
            self.regions.append(Region(low, high, at, at - (low - first), _memory(first, -(-high // 16) * 16 - first)))
            at += high - low + GAP_BYTES
        self.n_bytes = -(-at // 256) * 256 + 256
        self.is_touched = np.zeros(self.n_bytes // SECTOR_BYTES, bool)

    def address(self, pointer: int) -> int:
        """Return the device address for a host address. Empty tensors get an address that must not be accessed."""
        return next((BASE + r.at + pointer - r.low for r in self.regions if r.low <= pointer < r.high), BASE)

    def parts(self, index: Any, n_bytes: int) -> list[tuple[Any, Region]]:
        """Group accesses by region.

        Returns:
            Selections of accesses with their regions. Accesses outside of all regions are left out.
        """
        if not len(index):
            return []
        least, most, found = index.min(), index.max(), []
        for region in self.regions:
            end = region.at + region.high - region.low - n_bytes
            if region.at <= least and most <= end:
                return [(slice(None), region)]
            chosen = (index >= region.at) & (index <= end)
            if chosen.any():
                found.append((chosen, region))
        return found

    def read(self, index: Any, size: int, n: int) -> list[Any]:
        """Return n adjacent words of `size` bytes for each index."""
        values = [np.zeros(len(index), UNSIGNED[8 * size]) for _ in range(n)]
        for chosen, region in self.parts(index, size * n):
            words, places = region.memory.view(UNSIGNED[8 * size]), (index[chosen] - region.first) // size
            for i, value in enumerate(values):
                value[chosen] = words[places + i]
        return values

    def write(self, index: Any, size: int, values: Any) -> None:
        for chosen, region in self.parts(index, size * len(values)):
            words, places = region.memory.view(UNSIGNED[8 * size]), (index[chosen] - region.first) // size
            for i, value in enumerate(values):
                words[places + i] = value[chosen]


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


def _memory(pointer: int, n_bytes: int) -> Any:
    if not n_bytes:
        return np.zeros(0, U8)
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(pointer), U8)
