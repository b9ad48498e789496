"""Checksums of runs of bytes in files, read piece by piece."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from hetero_ee.weights.store.manifest import Entry, Region
from hetero_ee_profiles.opened_file import open_regular

PIECE_BYTES = 2**20
MAX_THREADS = 8  # beyond it, disks and memory are what is waited for


def sha256_of(file: BinaryIO, offset: int, n_bytes: int, each: Callable[[memoryview], None] | None = None) -> str:
    """SHA-256 of the bytes from `offset` on, as far as the file goes. `each` is shown them piece by piece."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(PIECE_BYTES, n_bytes)))
    file.seek(offset)
    while n_bytes:
        n_read = file.readinto(buffer[: min(len(buffer), n_bytes)])  # type: ignore[attr-defined]
        if not n_read:
            break
        digest.update(buffer[:n_read])
        if each:
            each(buffer[:n_read])
        n_bytes -= n_read
    return digest.hexdigest()


def first_set_byte(file: BinaryIO, start: int, end: int) -> int | None:
    """Where the first byte from `start` to `end` lies that is not 0, None where all are. For padding: one read."""
    file.seek(start)
    data = file.read(end - start)
    return start + len(data) - len(data.lstrip(b"\0")) if data.strip(b"\0") else None


def is_written(file: BinaryIO, start: int, entry: Entry) -> bool:
    """Whether the tensor's bytes match its checksums; from `start`, where the one before it ends, there is padding."""
    for region in entry.regions:
        is_padded = first_set_byte(file, start, region.offset) is None
        if not is_padded or sha256_of(file, region.offset, region.n_bytes) != region.sha256:
            return False
        start = region.end
    return True


def first_damaged(file: Path, regions: Iterable[Region]) -> Region | None:
    """The first region whose bytes do not match its checksum, None where all do. Several threads share the work."""
    regions = list(regions)
    n_threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(n_threads) as pool:
        found = pool.map(lambda first: _first_damaged(file, regions[first::n_threads]), range(n_threads))
        damaged = [region for region in found if region is not None]
    return min(damaged, key=lambda region: region.offset, default=None)


def _first_damaged(file: Path, regions: Iterable[Region]) -> Region | None:
    with open_regular(file, buffering=0) as opened:
        for region in regions:
            if sha256_of(opened, region.offset, region.n_bytes) != region.sha256:
                return region
    return None
