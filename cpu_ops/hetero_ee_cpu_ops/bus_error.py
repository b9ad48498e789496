"""A last sentence for a process whose mapped file was cut short, or whose disk failed, while a kernel read it.

The system ends such a process by SIGBUS without a word. Python's own signal handlers can't help: they run after the
instruction that failed, and it fails again. A compiled one writes the sentence and ends the process there and then.
"""

import ctypes
import signal

from numba import types

from hetero_ee_cpu_ops.lazy import Chunk
from hetero_ee_cpu_ops.simd.floats import scratch, write_integer

MESSAGE = (
    b"\nhetero-ee: a file of the model was cut short, or its disk failed, while it was read; put it right and start "
    b"again.\n"
)
WORDS = tuple(
    int.from_bytes(MESSAGE[start : start + 8].ljust(8, b"\0"), "little") for start in range(0, len(MESSAGE), 8)
)
N_WORDS, N_BYTES, ROOM_BYTES = len(WORDS), len(MESSAGE), 8 * len(WORDS)
STANDARD_ERROR, FAILURE = 2, 1

_write = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp))
_exit = types.ExternalFunction("_exit", types.void(types.int32))


def _on_bus_error(_number: int, _unused: int) -> None:
    address = scratch(ROOM_BYTES)
    for index in range(N_WORDS):
        write_integer(WORDS[index], address + 8 * index)
    _write(STANDARD_ERROR, address, N_BYTES)
    _exit(FAILURE)


HANDLER = Chunk(_on_bus_error)


def end_with_a_sentence_on_bus_errors() -> None:
    """From now on SIGBUS writes MESSAGE to standard error and ends the process with exit code 1; not on Windows."""
    if hasattr(signal, "SIGBUS"):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(int(signal.SIGBUS), HANDLER.address)
