"""A GPU made of this machine's CPU: its memory is the CPU's, its time is scripted, and any call can be made to fail."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from hetero_ee_profiles.gpu.platform import Work

GPU, PINNED, PAGEABLE = "gpu", "pinned", "pageable"
RATES = {  # bytes per second, by source and target
    (PINNED, GPU): 20e9,
    (GPU, PINNED): 16e9,
    (PAGEABLE, GPU): 8e9,
    (GPU, PAGEABLE): 4e9,
    (GPU, GPU): 200e9,  # of each byte copied, which is read and written
}
COPY_S, LAUNCH_S, SYNCHRONIZE_S, WAIT_S = 5e-6, 2e-6, 7e-6, 3e-6


class StandInGpu:
    """driver_bytes: what the driver says is free while nothing is held; usable_bytes: what can really be had.

    fail: name of the method that raises `error`, from its n-th call on.
    """

    kind = "cuda"
    device = torch.device("cpu")

    def __init__(
        self,
        driver_bytes: int = 2**25,
        usable_bytes: int | None = None,
        l2_bytes: int = 2**16,
        fail: str = "",
        error: BaseException | None = None,
        n: int = 1,
    ) -> None:
        self.l2_bytes = l2_bytes
        self.now_s, self.n_recorded, self.largest_bytes = 0.0, 0, 0
        self.calls: dict[str, int] = {}
        self._driver_bytes = driver_bytes
        self._usable_bytes = driver_bytes if usable_bytes is None else usable_bytes
        self._fail, self._error, self._n = fail, error, n
        self._pending_s, self.held_bytes = 0.0, 0
        self._places: dict[int, str] = {}

    def clock(self) -> float:
        """Never stands still."""
        self.now_s += 1e-9
        return self.now_s

    def spend(self, seconds: float) -> None:
        """The GPU is busy for so long with what was begun."""
        self._pending_s += seconds

    def current(self) -> AbstractContextManager[Any]:
        self._called("current")
        return self._inside()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        yield

    def free_bytes(self) -> int:
        self._called("free_bytes")
        return self._driver_bytes - self.held_bytes

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._called("allocate")
        tensor = torch.zeros(shape, dtype=dtype)
        if self.held_bytes + tensor.nbytes > self._usable_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.held_bytes += tensor.nbytes
        self.largest_bytes = max(self.largest_bytes, tensor.nbytes)
        return self._placed(tensor, GPU, tensor.nbytes)

    def pinned(self, n_bytes: int) -> Tensor:
        self._called("pinned")
        return self._placed(torch.zeros(n_bytes, dtype=torch.uint8), PINNED, 0)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._called("copy")
        target.copy_(source)
        self.now_s += 1e-6
        self.spend(COPY_S + source.nbytes / RATES[self._place(source), self._place(target)])

    def launch(self, x: Tensor) -> None:
        self._called("launch")
        x.add_(1)
        self.now_s += LAUNCH_S

    def at_once(self, *works: Work) -> None:
        self._called("at_once")
        before, ends = self._pending_s, []
        for work in works:
            self._pending_s = before
            work()
            ends.append(self._pending_s)
        self._pending_s = max(ends)

    def synchronize(self) -> None:
        self._called("synchronize")
        self._pass(SYNCHRONIZE_S)

    def wait(self) -> None:
        self._called("wait")
        self._pass(WAIT_S)

    def recorded(self, work: Work) -> Work:
        self._called("recorded")
        self.n_recorded += 1
        return work

    def seconds(self, work: Work, repeats: int) -> list[float]:
        self._called("seconds")
        found = []
        for repeat in range(repeats + 1):
            before = self._pending_s
            work()
            if repeat:
                found.append(max(self._pending_s - before, 1e-9))
        self._pass(0.0)
        return found

    def _pass(self, seconds: float) -> None:
        self.now_s += self._pending_s + seconds
        self._pending_s = 0.0

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == self._fail and self.calls[name] >= self._n:
            raise self._error or RuntimeError("CUDA error: an illegal memory access was encountered")

    def _placed(self, tensor: Tensor, place: str, n_bytes: int) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        self._places[where] = place
        weakref.finalize(tensor.untyped_storage(), self._forget, where, n_bytes)
        return tensor

    def _forget(self, where: int, n_bytes: int) -> None:
        self.held_bytes -= n_bytes
        self._places.pop(where, None)

    def _place(self, tensor: Tensor) -> str:
        return self._places.get(tensor.untyped_storage().data_ptr(), PAGEABLE)


METHODS = tuple(
    name
    for name, value in vars(StandInGpu).items()
    if callable(value) and not name.startswith("_") and name not in ("clock", "spend")
)
