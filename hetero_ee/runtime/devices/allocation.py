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


def memory_error(device: str, purpose: str, n_bytes: int | None, free_bytes: int) -> DeviceMemoryError:
    """What to raise where the device has no n_bytes for `purpose`; None: nobody has said how many."""
    free = f"{max(free_bytes, 0) / MIB:.1f} MiB"
    asked = f"more on the {device.upper()} than the {free} that are free"
    if n_bytes is not None:
        asked = f"{n_bytes / MIB:.1f} MiB on the {device.upper()} and {free} are free"
    return DeviceMemoryError(f"{purpose} needs {asked}; {WAYS_OUT[device]}", device)
