"""Reads memory and does nothing else, which is the upper limit of speed for kernels that stream weights.

Sums all 64-byte lines of a buffer lane by lane; the sums are stored so that the compiler keeps every load.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hetero_ee_cpu_ops.jit.lazy import Chunk
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.simd.bytes import I64, load, prefetch, word

CHUNK_BYTES = 2**18
PREFETCH_BYTES = 4096
I64X8 = ir.VectorType(I64, 8)
BUFFER, N_BYTES, SINK = range(3)


@intrinsic
def add_lines(typing: Any, address: Any, sink: Any) -> Any:
    """Add the 256 bytes at `address` to the eight int64 sums at `sink`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[1], I64X8.as_pointer())
        lines = [load(builder, arguments[0], I64X8, 64 * line) for line in range(4)]
        total = builder.add(builder.add(lines[0], lines[1]), builder.add(lines[2], lines[3]))
        old = builder.load(pointer)
        old.align = 8
        builder.store(builder.add(old, total), pointer).align = 8
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


def _chunk(arguments: int, index: int) -> None:
    address = word(arguments, BUFFER) + index * CHUNK_BYTES
    end = min(address + CHUNK_BYTES, word(arguments, BUFFER) + word(arguments, N_BYTES))
    sink = word(arguments, SINK) + index * 64
    while address < end:
        for line in range(4):
            prefetch(address + PREFETCH_BYTES + 64 * line)
        add_lines(address, sink)
        address += 256


CHUNK_FUNCTION = Chunk(_chunk)


class Read:
    """Reads a whole buffer once, with all threads of a pool."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool

    def __call__(self, buffer: Any) -> int:
        """Return the sum of the buffer's int64 words, modulo 2^64. Raises: ValueError: unless 256 divides its size."""
        if buffer.nbytes % 256 or not buffer.flags.c_contiguous:
            raise ValueError(f"The buffer has {buffer.nbytes} bytes, expected a contiguous multiple of 256.")
        n_chunks = -(-buffer.nbytes // CHUNK_BYTES)
        sums = np.zeros(n_chunks * 8, np.int64)
        arguments = np.array([buffer.ctypes.data, buffer.nbytes, sums.ctypes.data], np.int64)
        self._pool.run(CHUNK_FUNCTION.address, arguments, n_chunks)
        return int(sums.sum())
