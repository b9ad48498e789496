"""Classifies errors of torch, Triton and the GPU driver: out of memory, a failing device, or neither."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetero_ee.errors import DeviceLostError, DeviceMemoryError, shown

NO_MEMORY = "out of memory"  # in the words of CUDA, HIP and Triton alike
FROM_DRIVER = ("CUDA", "HIP", "Triton Error")  # how messages of RuntimeError begin that are no AcceleratorError
ASKED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MIB = 2**20
WAYS_OUT = {
    "gpu": "lower the VRAM budget or the context size, or close other programs that use the GPU.",
    "cpu": "lower the context size, or close other programs.",
}


@contextmanager
def driver_errors(
    purpose: str, free_bytes: Callable[[], int], *, device: str = "gpu", n_bytes: int | None = None
) -> Iterator[None]:
    """Turn driver errors inside the block into DeviceMemoryError or DeviceLostError.

    Args:
        purpose: The work inside the block, for messages.
        device: The device that may run out of memory, with free_bytes free.
        n_bytes: The requested bytes, or None if only torch knows them.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_of_driver(error):
            raise
        if NO_MEMORY not in str(error):
            raise _lost(purpose, error) from error
        raise memory_error(device, purpose, n_bytes or _asked_bytes(error), _free(purpose, free_bytes)) from error


def _is_of_driver(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or str(error).startswith(FROM_DRIVER)


def _asked_bytes(error: RuntimeError) -> int | None:
    """Return the requested bytes from torch's error message."""
    found = ASKED.search(str(error))
    return round(float(found[1]) * UNITS[found[2]]) if found else None


def _free(purpose: str, free_bytes: Callable[[], int]) -> int:
    try:
        return free_bytes()
    except RuntimeError as error:
        raise _lost(purpose, error) from error


def _lost(purpose: str, error: RuntimeError) -> DeviceLostError:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return DeviceLostError(
        f"the GPU failed during {purpose} ({shown(words[0])}); start again, with a VRAM budget of 0 to do without it."
    )


def memory_error(device: str, purpose: str, n_bytes: int | None, free_bytes: int) -> DeviceMemoryError:
    """Return the error for a device without n_bytes (None if unknown) for `purpose`."""
    free = f"{max(free_bytes, 0) / MIB:.1f} MiB"
    asked = f"more on the {device.upper()} than the {free} that are free"
    if n_bytes is not None:
        asked = f"{n_bytes / MIB:.1f} MiB on the {device.upper()} and {free} are free"
    return DeviceMemoryError(f"{purpose} needs {asked}; {WAYS_OUT[device]}", device)
