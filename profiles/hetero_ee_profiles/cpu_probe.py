"""Measures how fast the CPU reads memory, the upper limit for every kernel that reads weights."""

from collections.abc import Sequence
from typing import Any

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.read import Read
from hetero_ee_profiles.probe_samples import Clock

READ_BYTES = 2**28  # at least this much, to exceed any cache


def probe_read_bytes_per_s(pool: ThreadPool, buffers: Sequence[Any], repeats: int, clock: Clock) -> list[float]:
    """Measure the memory read rate of the pool's threads. buffers: contiguous arrays of READ_BYTES or more in total."""
    read, n_bytes = Read(pool), sum(buffer.nbytes for buffer in buffers)

    def read_all() -> None:
        for buffer in buffers:
            read(buffer)

    read_all()
    rates = []
    for _ in range(repeats):
        start_s = clock()
        read_all()
        rates.append(n_bytes / (clock() - start_s))
    return rates
