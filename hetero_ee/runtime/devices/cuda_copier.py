"""Moves hidden states between the CPU and a GPU through rotating pinned buffers, so that the host rarely waits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetero_ee.runtime.devices.cuda_driver import CudaDriver
from hetero_ee.runtime.devices.device import Link

N_BUFFERS = 4  # a prompt has two chunks under way, and what came to the CPU stays valid until the second call after
GPU_TYPE = "cuda"


class CudaCopier:
    """Moves hidden states as part of `Link.transfer`, through buffers used in rotation.

    Args:
        n_rows: rows that buffers hold; larger buffers are made when needed.
        row_bytes: bytes of one row.
    """

    def __init__(self, driver: CudaDriver, link: Link, n_rows: int, row_bytes: int) -> None:
        self._driver, self._stream = driver, driver.compute_stream()
        n_bytes = n_rows * row_bytes
        self._to_gpu = _Rotation(link.host_buffer, n_bytes)
        self._to_cpu = _Rotation(link.host_buffer, n_bytes)
        self._on_gpu = _Rotation(self._gpu_buffer, n_bytes)
        self._copied: list[Any] = [None] * N_BUFFERS

    def is_on_gpu(self, x: Tensor) -> bool:
        return x.device.type == GPU_TYPE

    @torch.inference_mode()
    def to_gpu(self, x: Tensor) -> Tensor:
        """Begin to copy x to the GPU, unless it is there. The result is valid until the fourth call after this one."""
        if self.is_on_gpu(x):
            return x
        index = self._to_gpu.next()
        if self._copied[index] is not None:
            self._copied[index].synchronize()  # or the host would overwrite what is being copied
        staged = self._to_gpu.like(x, index)
        staged.copy_(x)
        found = self._on_gpu.like(x, self._on_gpu.next())
        found.copy_(staged, non_blocking=True)
        self._copied[index] = self._recorded()
        return found

    @torch.inference_mode()
    def to_cpu(self, x: Tensor) -> Tensor:
        if not self.is_on_gpu(x):
            return x
        found = self._to_cpu.like(x, self._to_cpu.next())
        found.copy_(x, non_blocking=True)
        return found

    def _recorded(self) -> Any:
        """Record an event on the current stream, which is the link's, and return it."""
        event = self._driver.new_event(is_timed=False)
        event.record(self._driver.compute_stream())
        return event

    def _gpu_buffer(self, n_bytes: int) -> Tensor:
        """Allocate a GPU buffer on the compute stream, since torch reuses freed memory only within a stream."""
        with self._driver.on_stream(self._stream):
            return self._driver.empty((n_bytes,), torch.uint8)


class _Rotation:
    """Buffers of at least n_bytes each, used in rotation."""

    def __init__(self, make: Callable[[int], Tensor], n_bytes: int) -> None:
        self._make = make
        self._buffers = [make(n_bytes) for _ in range(N_BUFFERS)]
        self._latest = N_BUFFERS - 1

    def next(self) -> int:
        self._latest = (self._latest + 1) % N_BUFFERS
        return self._latest

    def like(self, x: Tensor, index: int) -> Tensor:
        """Return the start of buffer `index` with the shape and type of x, enlarging the buffer if necessary."""
        if self._buffers[index].nbytes < x.nbytes:
            self._buffers[index] = self._make(x.nbytes)
        return self._buffers[index][: x.nbytes].view(x.dtype).view(x.shape)
