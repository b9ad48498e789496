"""A GPU as the probes use it: memory, its own clock, recorded launches, copies. A seam: tests put a CPU there."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

LEAST_S = 5e-7  # what the events of CUDA resolve; a shorter time counts as this
Work = Callable[[], Any]


class GpuPlatform(Protocol):
    """kind: "cuda" or "rocm", as in the registry. Everything may raise RuntimeError, as drivers have it."""

    kind: str
    device: torch.device
    l2_bytes: int

    def current(self) -> AbstractContextManager[Any]:
        """Inside, kernels are launched on this GPU."""
        ...

    def free_bytes(self) -> int:
        """Memory that the driver says is free, once torch has given back what it only keeps for later."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the GPU, with anything in it. Raises torch.OutOfMemoryError."""
        ...

    def pinned(self, n_bytes: int) -> Tensor:
        """Memory of the CPU, uint8, that the GPU copies from and to by itself."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begins the copy; where both ends allow it, returns before it is done."""
        ...

    def launch(self, x: Tensor) -> None:
        """Begins the smallest kernel there is: x += 1."""
        ...

    def at_once(self, *works: Work) -> None:
        """Begins each work on a stream of its own."""
        ...

    def synchronize(self) -> None:
        """Waits until everything that was begun is done."""
        ...

    def wait(self) -> None:
        """The same by an event, for what was begun on the stream in use."""
        ...

    def recorded(self, work: Work) -> Work:
        """What repeats the launches of `work`, which must have run once, as one graph."""
        ...

    def seconds(self, work: Work, repeats: int) -> list[float]:
        """Of each of so many runs, one after the other, by the GPU's clock; one more runs before them, so that the GPU
        is busy while the first is being launched."""
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
    """The GPU of that name, else the one with most memory; None where torch has none and none is named.

    model: as the driver names it. Raises RuntimeError where one is named and torch can't use it.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        is_usable = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if not is_usable:
        if model is None:
            return None
        said = f" ({str(told[0].message).splitlines()[0]})" if told else ""
        raise RuntimeError(f"torch {torch.__version__} for {_built_for()} can't use it{said}")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    best = max(range(len(found)), key=lambda index: (found[index].name == model, found[index].total_memory))
    return CudaPlatform(best)


def _built_for() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
