"""Identifies a weight file without reading all of it.

Names, sizes and times are not enough: archives, reproducible images and `rsync -t` may give different weights the same
ones.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.gguf.header import MAGIC
from hetero_ee.weights.safetensors_file import MAX_HEADER_BYTES
from hetero_ee.weights.store.checksums import sha256_of
from hetero_ee_profiles.opened_file import open_regular

WHOLE_BYTES = 2**20  # of a file that is its own sample
N_SAMPLES, SAMPLE_BYTES = 256, 64  # spread over a larger one: in 5 GB, two or more in a matrix of 4096 x 4096 bf16


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Name, size, time and sample of a file when it was read."""

    name: str
    n_bytes: int
    mtime_ns: int  # when it was last written, since 1970
    sample_sha256: str  # of its header and of parts of its content, see `_sample`

    @classmethod
    def of(cls, file: Path) -> Self:
        """Record a file. Raises: CheckpointError."""
        with readable(file) as opened:
            status = os.fstat(opened.fileno())
            sample = _sample(opened, status.st_size)
        return cls(file.name, status.st_size, status.st_mtime_ns, sample)


@contextmanager
def readable(file: Path) -> Iterator[BinaryIO]:
    """Open the file unbuffered. Raises: CheckpointError."""
    try:
        with open_regular(file, buffering=0) as opened:
            yield opened  # a raw file, whose reads may be short only at its end
    except OSError as error:
        raise CheckpointError(f"{file} can't be read ({error}).") from error


def _sample(file: BinaryIO, n_bytes: int) -> str:
    """Return the SHA-256 of a small file, or of a large file's header (or beginning) and evenly spread parts."""
    if n_bytes <= WHOLE_BYTES:
        return sha256_of(file, 0, n_bytes)
    start = file.read(8)
    header_bytes = WHOLE_BYTES if start.startswith(MAGIC) else 8 + int.from_bytes(start, "little")
    digest = hashlib.sha256(sha256_of(file, 0, min(header_bytes, MAX_HEADER_BYTES)).encode())
    for index in range(N_SAMPLES):
        file.seek((n_bytes - SAMPLE_BYTES) * index // (N_SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
