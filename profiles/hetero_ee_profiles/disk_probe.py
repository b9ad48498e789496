"""Measures how fast a file is read from the disk, after asking the system to drop it from its cache."""

import os
from collections.abc import Callable
from pathlib import Path

from hetero_ee_profiles.opened_file import open_regular

PIECE_BYTES = 2**23
MAX_BYTES = 2**29
MAX_S = 1.0


def probe_disk_bytes_per_s(file: Path, clock: Callable[[], float]) -> list[float]:
    """Return the rates of successive reads, which are RAM's if the file stays cached. Raises: OSError: if it fails."""
    rates: list[float] = []
    with open_regular(file, buffering=0) as source:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun_s = clock()
        while len(rates) * PIECE_BYTES < MAX_BYTES and clock() - begun_s < MAX_S:
            start_s = clock()
            n_read = len(source.read(PIECE_BYTES))
            elapsed_s = clock() - start_s
            if n_read == 0 or (n_read < PIECE_BYTES and rates):
                break
            rates.append(n_read / max(elapsed_s, 1e-9))
    return rates
