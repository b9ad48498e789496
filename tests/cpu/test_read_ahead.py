"""Rows of a mapped file come into memory before anything touches them."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from hetero_ee_cpu_ops.read_ahead import read_ahead

ROW_BYTES, N_ROWS = 2**16, 64

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="a system without such advice")


def in_memory(rows: np.ndarray) -> list[bool]:
    """Which pages of the rows are."""
    found = (ctypes.c_ubyte * (rows.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(rows.nbytes), found) == 0
    return [bool(page & 1) for page in found]


def test_the_rows_that_are_asked_for_are_read_and_no_others(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(bytes(ROW_BYTES * N_ROWS))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    rows = np.frombuffer(mapped, np.uint8).reshape(N_ROWS, ROW_BYTES)
    if any(in_memory(rows)):
        pytest.skip("this file system keeps its files in memory")
    read_ahead(rows, 8, 12)
    until_s = time.monotonic() + 10
    while not all(in_memory(rows[8:12])) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert all(in_memory(rows[8:12])) and not any(in_memory(rows[32:]))
    assert not rows[8:12].any()


def test_arrays_in_plain_memory_are_left_as_they_are() -> None:
    rows = np.arange(4096, dtype=np.int32).reshape(16, 256)
    read_ahead(rows, 1, 16)
    assert (rows.ravel() == np.arange(4096)).all()
