"""Checksums of byte ranges in files, read piece by piece."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from hetero_ee.weights.store.manifest import Entry, Region
from hetero_ee_profiles.opened_file import open_regular

PIECE_BYTES = 2**20
MAX_THREADS = 8  # with more of them, disks and memory are the limit


def sha256_of(file: BinaryIO, offset: int, n_bytes: int, each: Callable[[memoryview], None] | None = None) -> str:
    """Return the SHA-256 of up to `n_bytes` from `offset` on. `each` is called with the bytes, piece by piece."""
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
    """Return the position of the first byte other than 0 from `start` to `end`, None if all are 0."""
    file.seek(start)
    data = file.read(end - start)
    return start + len(data) - len(data.lstrip(b"\0")) if data.strip(b"\0") else None


def is_written(file: BinaryIO, start: int, entry: Entry) -> bool:
    """Return whether a tensor's bytes match its checksums, and its padding, from `start` on, is 0."""
    for region in entry.regions:
        is_padded = first_set_byte(file, start, region.offset) is None
        if not is_padded or sha256_of(file, region.offset, region.n_bytes) != region.sha256:
            return False
        start = region.end
    return True


def first_damaged(file: Path, regions: Iterable[Region]) -> Region | None:
    """Return the first region in the file that differs from its checksum, None if none does. Uses several threads."""
    regions = list(regions)
    n_threads = min(MAX_THREADS, os.cpu_count() or 1)

    def damaged_of(first: int) -> Region | None:
        with open_regular(file, buffering=0) as opened:
            return damaged_region(opened, regions[first::n_threads])

    with ThreadPoolExecutor(n_threads) as pool:
        damaged = [region for region in pool.map(damaged_of, range(n_threads)) if region is not None]
    return min(damaged, key=lambda region: region.offset, default=None)


def damaged_region(file: BinaryIO, regions: Iterable[Region]) -> Region | None:
    """Return the first of the regions, in the given order, that differs from its checksum, None if none does."""
    found = (region for region in regions if sha256_of(file, region.offset, region.n_bytes) != region.sha256)
    return next(found, None)
