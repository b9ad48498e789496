"""Interfaces of devices and of the link between them."""

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
    """Memory of a device, claimed for `purpose` until free(). Freeing it twice does nothing."""

    def __init__(self, purpose: str, n_bytes: int, on_free: "Callable[[Allocation], None]") -> None:
        self.purpose, self.n_bytes = purpose, n_bytes
        self._on_free = on_free

    def free(self) -> None:
        self._on_free(self)


class Event(Protocol):
    """The end of some work, which other work can wait for."""

    def wait(self) -> None:
        """Make the host wait until the event is reached. Raises: DeviceLostError: if the device fails."""
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
        """Allocate uninitialized memory that was claimed before. Raises: DeviceMemoryError: if there is none."""

    @abstractmethod
    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        """Call `compute`, which on a GPU launches work, after the events `after`.

        Args:
            works: descriptions of the work, for traces and emulated times.

        Returns:
            The value of `compute`, and the event of its end. A GPU's value may be used only after that event, or by
            later work of the same device, which runs in order.

        Raises:
            DeviceMemoryError, DeviceLostError: for errors of the driver. Other errors of `compute` are passed on.
        """

    @property
    def claimed_bytes(self) -> int:
        return sum(allocation.n_bytes for allocation in self._claims)

    def allocate(self, n_bytes: int, purpose: str) -> Allocation:
        """Claim memory of the device, to be allocated later.

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
    """Copies between CPU and GPU memory. In each direction, copies keep their order, and so do transfers.

    `to` is the target device, "cpu" or "gpu". The source must not change until the copy's event. The target must exist
    before the call, since torch would reuse memory that `compute` allocates on the link's stream.
    """

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Call `compute`, which copies n_bytes of weights or KV cache, after the events. Raises as Device.run does."""
        ...

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Call `compute`, which copies n_rows of hidden states, after the events. The event is for the device `to`."""
        ...

    def host_buffer(self, n_bytes: int) -> Tensor:
        """Allocate CPU memory (uint8) that can be copied at full speed. Raises: DeviceMemoryError: if there is none."""
        ...
