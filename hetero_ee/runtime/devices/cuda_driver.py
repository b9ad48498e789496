"""What the runtime asks of torch.cuda, as a seam: streams, events and memory of one GPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class CudaDriver(Protocol):
    """Streams have wait_event(event); events record(stream), query(), synchronize() and elapsed_time(later), in ms.

    Everything may raise RuntimeError.
    """

    def compute_stream(self) -> Any:
        """The stream that torch's and Triton's launches go to by themselves."""
        ...

    def new_stream(self) -> Any: ...

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, launches and copies of this thread go to the stream and its GPU."""
        ...

    def new_event(self, *, is_timed: bool) -> Any: ...

    def free_bytes(self) -> int:
        """Of the GPU, as the driver says."""
        ...

    def kept_bytes(self) -> int:
        """That torch has taken from the driver, in use or not."""
        ...

    def used_bytes(self) -> int:
        """That tensors take of the kept ones."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def pinned(self, n_bytes: int) -> Tensor:
        """uint8 memory of the CPU that the GPU copies from and to by itself."""
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
