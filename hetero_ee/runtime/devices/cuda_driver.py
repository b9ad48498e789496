"""The part of torch.cuda that the runtime uses, as a protocol: streams, events and memory of one GPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class CudaDriver(Protocol):
    """Streams, events and memory of one GPU. Any method may raise RuntimeError.

    Streams and events have the methods of torch.cuda.Stream and torch.cuda.Event. Times are in ms.
    """

    def compute_stream(self) -> Any:
        """Return the stream that torch and Triton launch on by default."""
        ...

    def new_stream(self) -> Any: ...

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which this thread's launches and copies use the stream and its GPU."""
        ...

    def new_event(self, *, is_timed: bool) -> Any: ...

    def free_bytes(self) -> int:
        """Return the GPU's free memory as the driver reports it."""
        ...

    def kept_bytes(self) -> int:
        """Return the memory that torch has reserved, whether it is in use or not."""
        ...

    def used_bytes(self) -> int:
        """Return the part of the reserved memory that tensors use."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def pinned(self, n_bytes: int) -> Tensor:
        """Return pinned CPU memory (uint8), which the GPU can copy asynchronously."""
        ...


class TorchCuda:
    """One GPU that torch calls cuda: NVIDIA's, or AMD's in a torch built for ROCm."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute_stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def new_event(self, *, is_timed: bool) -> Any:
        return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def kept_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
