"""The interface of devices and of the link between them, with real, emulated and faulty implementations."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hetero_ee.costs.work import Work
from hetero_ee.device_errors import memory_error

T = TypeVar("T")
CPU, GPU = "cpu", "gpu"


class Allocation:
    """Memory of a device, claimed for `purpose` until free(). Freeing it again does nothing."""

    def __init__(self, purpose: str, n_bytes: int, on_free: "Callable[[Allocation], None]") -> None:
        self.purpose, self.n_bytes = purpose, n_bytes
        self._on_free = on_free

    def free(self) -> None:
        """Release the bytes."""
        self._on_free(self)


class Event(Protocol):
    """The end of a piece of work, after which other work can start."""

    def wait(self) -> None:
        """Let the host wait until it is reached. Raises: DeviceLostError."""
        ...


class Device(ABC):
    """A processor with memory. Any method may raise DeviceLostError.

    Args:
        name: "cpu" or "gpu"; the CPU is the host.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._claims: set[Allocation] = set()

    @abstractmethod
    def free_bytes(self) -> int:
        """Return the memory that can still be claimed, at least 0."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialized memory, which was claimed before. Raises: DeviceMemoryError."""

    @abstractmethod
    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        """Call `compute` after the events. On a GPU it launches work.

        Args:
            works: describe the work.

        Returns:
            The value of `compute`, and the event of its end. A GPU's value may only be used after that event, or in
            later work of the same device, which runs in order.

        Raises:
            DeviceMemoryError, DeviceLostError: for errors of the driver; other errors of `compute` as they are.
        """

    @property
    def claimed_bytes(self) -> int:
        return sum(allocation.n_bytes for allocation in self._claims)

    def allocate(self, n_bytes: int, purpose: str) -> Allocation:
        """Claim memory before it is used.

        Raises:
            DeviceMemoryError: if it does not fit. Nothing has changed then.
            ValueError: if n_bytes is negative.
        """
        if n_bytes < 0:
            raise ValueError(f"{purpose}: {n_bytes} bytes were asked for, expected 0 or more.")
        free_bytes = self.free_bytes()
        if n_bytes > free_bytes:
            raise memory_error(self.name, purpose, n_bytes, free_bytes)
        allocation = Allocation(purpose, n_bytes, self._claims.discard)
        self._claims.add(allocation)
        return allocation


class Link(Protocol):
    """Copies between CPU and GPU memory. Copies in one direction keep their order, as do transfers.

    `to` is the target device, "cpu" or "gpu". The source must not change until the copy's event. The target must exist
    before: torch would reuse memory allocated in `compute` for the link's stream.
    """

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Copy n_bytes of weights or KV cache after the events; `compute` begins the copy. Raises as Device.run."""
        ...

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Copy n_rows of hidden states likewise. The event is reached when the device `to` can use them."""
        ...

    def host_buffer(self, n_bytes: int) -> Tensor:
        """Allocate CPU memory (uint8) that is copied at full speed. Raises: DeviceMemoryError."""
        ...
