"""The GPU interface that probes use: memory, clock, recorded launches and copies. In tests a CPU implements it."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

LEAST_S = 5e-7  # resolution of CUDA events; shorter times count as this
Work = Callable[[], Any]


class GpuPlatform(Protocol):
    """A GPU for probes. Its kind is "cuda" or "rocm". Any method may raise the driver's RuntimeError."""

    kind: str
    device: torch.device
    l2_bytes: int

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on this GPU."""
        ...

    def free_bytes(self) -> int:
        """Return the driver's count of free memory, after torch has released its cached memory."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialized GPU memory. Raises: torch.OutOfMemoryError: if there is too little."""
        ...

    def pinned(self, n_bytes: int) -> Tensor:
        """Allocate pinned CPU memory (uint8)."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy, without waiting for its end if the CPU's memory is pinned."""
        ...

    def launch(self, x: Tensor) -> None:
        """Launch a very small kernel: x += 1."""
        ...

    def at_once(self, *works: Work) -> None:
        """Start each of the works on a stream of its own."""
        ...

    def synchronize(self) -> None: ...

    def wait(self) -> None:
        """Wait for the work of the current stream, by an event."""
        ...

    def recorded(self, work: Work) -> Work:
        """Record the launches of `work`, which must have run before, as a graph. Return a function that replays it."""
        ...

    def seconds(self, work: Work, repeats: int) -> list[float]:
        """Return the seconds of each of `repeats` consecutive runs of `work`, by the GPU's clock.

        One more run precedes them, so that the GPU is busy while the first timed run is launched.
        """
        ...


class CudaPlatform:
    """A GPU that torch calls cuda: NVIDIA's, or AMD's in a torch built for ROCm."""

    def __init__(self, index: int) -> None:
        self.kind = "rocm" if torch.version.hip else "cuda"
        self.device = torch.device("cuda", index)
        self.l2_bytes = int(torch.cuda.get_device_properties(index).L2_cache_size)

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def launch(self, x: Tensor) -> None:
        x.add_(1)

    def at_once(self, *works: Work) -> None:
        for work in works:
            with torch.cuda.stream(self._new_stream()):
                work()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def wait(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()

    def recorded(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._new_stream()):
            work()
        replay: Work = graph.replay
        return replay

    def seconds(self, work: Work, repeats: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        work()
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        self.synchronize()
        return [max(before.elapsed_time(after) / 1e3, LEAST_S) for before, after in pairwise(events)]

    def _new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]


def cuda_platform(model: str | None) -> CudaPlatform | None:
    """Return the GPU called `model` (the driver's name for it), else the one with the most memory.

    It is None if torch has no GPU and `model` is None.

    Raises:
        RuntimeError: if `model` is given and torch cannot use any GPU.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_usable = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if not is_usable:
        if model is None:
            return None
        reason = f" ({str(caught[0].message).splitlines()[0]})" if caught else ""
        raise RuntimeError(f"torch {torch.__version__} for {_built_for()} cannot use it{reason}")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    best = max(range(len(found)), key=lambda index: (found[index].name == model, found[index].total_memory))
    return CudaPlatform(best)


def _built_for() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
