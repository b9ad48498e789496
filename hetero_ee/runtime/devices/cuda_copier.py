"""Hidden states between the CPU and a GPU, through pinned buffers used in rotation: the host never waits for a copy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetero_ee.runtime.devices.cuda_driver import CudaDriver
from hetero_ee.runtime.devices.device import Link

N_TURNS = 4  # a prompt has two chunks on their way; what came to the CPU stays until the second call after
GPU_TYPE = "cuda"


class CudaCopier:
    """row_bytes, n_rows: what is moved most at a time; of more, buffers are made when it comes.

    To be used in `Link.transfer`, after all work that the GPU was given: a buffer there is free by then.
    """

    def __init__(self, driver: CudaDriver, link: Link, n_rows: int, row_bytes: int) -> None:
        self._driver, self._stream = driver, driver.compute_stream()
        n_bytes = n_rows * row_bytes
        self._to_gpu = _Turns(link.host_buffer, n_bytes)
        self._to_cpu = _Turns(link.host_buffer, n_bytes)
        self._on_gpu = _Turns(self._gpu_buffer, n_bytes)
        self._copied: list[Any] = [None] * N_TURNS

    def is_on_gpu(self, x: Tensor) -> bool:
        """See Copier.is_on_gpu."""
        return x.device.type == GPU_TYPE

    @torch.inference_mode()
    def to_gpu(self, x: Tensor) -> Tensor:
        """See Copier.to_gpu. Valid until the fourth call after."""
        if self.is_on_gpu(x):
            return x
        turn = self._to_gpu.next()
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()  # else the host would write over what is being copied
        staged = self._to_gpu.like(x, turn)
        staged.copy_(x)
        found = self._on_gpu.like(x, self._on_gpu.next())
        found.copy_(staged, non_blocking=True)
        self._copied[turn] = self._recorded()
        return found

    @torch.inference_mode()
    def to_cpu(self, x: Tensor) -> Tensor:
        """See Copier.to_cpu."""
        if not self.is_on_gpu(x):
            return x
        found = self._to_cpu.like(x, self._to_cpu.next())
        found.copy_(x, non_blocking=True)
        return found

    def _recorded(self) -> Any:
        """An event on the stream in use, which is the link's."""
        event = self._driver.new_event(is_timed=False)
        event.record(self._driver.compute_stream())
        return event

    def _gpu_buffer(self, n_bytes: int) -> Tensor:
        """Of the stream that computes: torch hands memory that is free there to the next work of the same stream."""
        with self._driver.on_stream(self._stream):
            return self._driver.empty((n_bytes,), torch.uint8)


class _Turns:
    """Buffers of n_bytes or more, used in rotation."""

    def __init__(self, make: Callable[[int], Tensor], n_bytes: int) -> None:
        self._make = make
        self._buffers = [make(n_bytes) for _ in range(N_TURNS)]
        self._latest = N_TURNS - 1

    def next(self) -> int:
        """The number of the buffer whose turn it is."""
        self._latest = (self._latest + 1) % N_TURNS
        return self._latest

    def like(self, x: Tensor, turn: int) -> Tensor:
        """The beginning of that buffer, with the shape and type of x; it grows where x is larger."""
        if self._buffers[turn].nbytes < x.nbytes:
            self._buffers[turn] = self._make(x.nbytes)
        return self._buffers[turn][: x.nbytes].view(x.dtype).view(x.shape)
