"""Time reading memory: no kernel that reads weights can be faster."""

from collections.abc import Sequence
from typing import Any

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.read import Read
from hetero_ee_profiles.probe_samples import Clock

READ_BYTES = 2**28  # at least this much, to exceed any cache


def probe_read_bytes_per_s(pool: ThreadPool, buffers: Sequence[Any], repeats: int, clock: Clock) -> list[float]:
    """Measure memory read bandwidth with the pool's threads; buffers: contiguous arrays, READ_BYTES or more in all."""
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
