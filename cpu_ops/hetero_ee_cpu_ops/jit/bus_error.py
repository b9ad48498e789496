"""Prints an error message when SIGBUS ends the process: a mapped file was truncated, or its disk failed.

Without it the process would end silently. Python's own signal handlers cannot help: they run after the faulting
instruction, which then faults again. A compiled handler can write the message and exit.
"""

import ctypes
import signal

from numba import types

from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.read_ahead import libc
from hetero_ee_cpu_ops.simd.floats import scratch, write_integer

MESSAGE = (
    b"\nhetero-ee: a model file was cut short, or its disk failed, while it was read. Restore the file and start "
    b"again.\n"
)
WORDS = tuple(
    int.from_bytes(MESSAGE[start : start + 8].ljust(8, b"\0"), "little") for start in range(0, len(MESSAGE), 8)
)
N_WORDS, N_BYTES, PADDED_BYTES = len(WORDS), len(MESSAGE), 8 * len(WORDS)
STANDARD_ERROR, FAILURE = 2, 1

_write = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp))
_exit = types.ExternalFunction("_exit", types.void(types.int32))


def _on_bus_error(_number: int, _unused: int) -> None:
    address = scratch(PADDED_BYTES)
    for index in range(N_WORDS):
        write_integer(WORDS[index], address + 8 * index)
    _write(STANDARD_ERROR, address, N_BYTES)
    _exit(FAILURE)


HANDLER = Chunk(_on_bus_error)


def report_bus_errors() -> None:
    """Make SIGBUS write MESSAGE to standard error and exit with code 1. Does nothing on Windows."""
    if hasattr(signal, "SIGBUS"):
        install = libc().signal
        install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        install(int(signal.SIGBUS), HANDLER.address)
