"""Times reading memory: what no kernel that reads weights can beat."""

from collections.abc import Sequence
from typing import Any

from hetero_ee_cpu_ops.read import Read
from hetero_ee_cpu_ops.thread_pool import ThreadPool
from hetero_ee_profiles.probe_samples import Clock

READ_BYTES = 2**28  # at least: more than a cache holds


def probe_read_bytes_per_s(pool: ThreadPool, buffers: Sequence[Any], repeats: int, clock: Clock) -> list[float]:
    """Memory read bandwidth on the thread pool's threads. buffers: contiguous arrays, READ_BYTES together or more."""
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
