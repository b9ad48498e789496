"""The memory's read bandwidth, and the bytes of a product's matrix."""

import itertools

import numpy as np

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_profiles.cpu_probe import probe_read_bytes_per_s
from hetero_ee_profiles.probe_samples import ProductShape

TICK_S = 0.25


def test_memory_read() -> None:
    buffers = [np.ones((2, 2**12), np.int64), np.ones(2**15, np.uint8)]
    ticks, pool = itertools.count(), ThreadPool(1)
    try:
        assert probe_read_bytes_per_s(pool, buffers, 4, lambda: next(ticks) * TICK_S) == [(2**16 + 2**15) / TICK_S] * 4
    finally:
        pool.close()


def test_bytes_of_a_shape_are_tiles_and_scales() -> None:
    int4, int8 = ProductShape("int4", 48, 40, 3), ProductShape("int8", 40, 64, 1)
    assert int4.grid == (3, 2) and int4.n_bytes == 6 * (256 + 32) and int8.n_bytes == 3 * 2 * (512 + 32)
