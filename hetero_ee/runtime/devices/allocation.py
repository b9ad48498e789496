"""Claims on a device's memory: who holds how many bytes, and for what."""

from collections.abc import Callable

from hetero_ee.errors import DeviceMemoryError

MIB = 2**20
WAYS_OUT = {
    "gpu": "lower --vram-budget or --ctx-size, or close other programs that use the GPU.",
    "cpu": "lower --ctx-size, or close other programs.",
}


class Allocation:
    """n_bytes of a device's memory, claimed for `purpose` until free(); freeing it again does nothing."""

    def __init__(self, purpose: str, n_bytes: int, on_free: "Callable[[Allocation], None]") -> None:
        self.purpose, self.n_bytes = purpose, n_bytes
        self._on_free = on_free

    def free(self) -> None:
        """Gives the bytes back."""
        self._on_free(self)


class Ledger:
    """The allocations of the device of this name ("cpu" or "gpu")."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._held: set[Allocation] = set()

    @property
    def held_bytes(self) -> int:
        return sum(allocation.n_bytes for allocation in self._held)

    def by_purpose(self) -> dict[str, int]:
        """Bytes held for each purpose, in order of the names."""
        purposes = sorted({allocation.purpose for allocation in self._held})
        return {purpose: sum(a.n_bytes for a in self._held if a.purpose == purpose) for purpose in purposes}

    def claim(self, n_bytes: int, purpose: str, free_bytes: int) -> Allocation:
        """Claims n_bytes of the free_bytes that can be had. Raises DeviceMemoryError, ValueError below 0."""
        if n_bytes < 0:
            raise ValueError(f"{purpose}: {n_bytes} bytes were asked for, expected 0 or more.")
        if n_bytes > free_bytes:
            raise memory_error(self._device, purpose, n_bytes, free_bytes)
        allocation = Allocation(purpose, n_bytes, self._held.discard)
        self._held.add(allocation)
        return allocation


def memory_error(device: str, purpose: str, n_bytes: int | None, free_bytes: int) -> DeviceMemoryError:
    """What to raise where the device has no n_bytes for `purpose`; None: nobody has said how many."""
    free = f"{max(free_bytes, 0) / MIB:.1f} MiB"
    asked = f"more on the {device.upper()} than the {free} that are free"
    if n_bytes is not None:
        asked = f"{n_bytes / MIB:.1f} MiB on the {device.upper()} and {free} are free"
    return DeviceMemoryError(f"{purpose} needs {asked}; {WAYS_OUT[device]}", device)
