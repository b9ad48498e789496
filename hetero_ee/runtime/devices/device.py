"""Devices and the link between them, as the executor sees them: a seam with a real, an emulated and a faulty side."""

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
    """n_bytes of a device's memory, claimed for `purpose` until free(); freeing it again does nothing."""

    def __init__(self, purpose: str, n_bytes: int, on_free: "Callable[[Allocation], None]") -> None:
        self.purpose, self.n_bytes = purpose, n_bytes
        self._on_free = on_free

    def free(self) -> None:
        """Gives the bytes back."""
        self._on_free(self)


class Event(Protocol):
    """The end of a piece of work, which other work can be told to start after."""

    def wait(self) -> None:
        """The host waits until it is reached. Raises DeviceLostError."""
        ...


class Device(ABC):
    """Something that computes and has memory. name: "cpu" or "gpu"; the CPU is the host.

    Any method may raise DeviceLostError.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._claims: set[Allocation] = set()

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that can still be claimed; never below 0."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the device with anything in it; it counts where it was claimed. Raises DeviceMemoryError."""

    @abstractmethod
    def run(self, works: Sequence[Work], compute: Callable[[], T], after: Sequence[Event] = ()) -> tuple[T, Event]:
        """Computes once the events are reached: what `compute` returns, and the event of its end.

        works: what it does, in numbers. On a GPU `compute` launches, and its result may only be used after the event,
        or in later work of the same device, which runs in order. Raises what `compute` raises, an error of the driver
        as DeviceMemoryError or DeviceLostError.
        """

    @property
    def claimed_bytes(self) -> int:
        return sum(allocation.n_bytes for allocation in self._claims)

    def allocate(self, n_bytes: int, purpose: str) -> Allocation:
        """Claims memory before it is used. Raises DeviceMemoryError, and ValueError below 0; nothing has changed."""
        if n_bytes < 0:
            raise ValueError(f"{purpose}: {n_bytes} bytes were asked for, expected 0 or more.")
        free_bytes = self.free_bytes()
        if n_bytes > free_bytes:
            raise memory_error(self.name, purpose, n_bytes, free_bytes)
        allocation = Allocation(purpose, n_bytes, self._claims.discard)
        self._claims.add(allocation)
        return allocation


class Link(Protocol):
    """Copies between the CPU's memory and the GPU's. Copies one way keep their order, as do transfers.

    `to` is the device at the end, "cpu" or "gpu". What is read must stay as it is until the copy's event, and what is
    written must be memory that was there before: made in `compute`, it would be the link's to give away again.
    """

    def copy(
        self, name: str, n_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Copies n_bytes (weights, keys and values) once the events are reached; `compute` begins the copy.

        Raises like Device.run.
        """
        ...

    def transfer(
        self, name: str, n_rows: int, row_bytes: int, to: str, compute: Callable[[], T], after: Sequence[Event] = ()
    ) -> tuple[T, Event]:
        """Copies n_rows of hidden states likewise; its event is reached when the device `to` can use them."""
        ...

    def host_buffer(self, n_bytes: int) -> Tensor:
        """uint8 memory of the CPU that copies run from and to at full speed. Raises DeviceMemoryError."""
        ...
