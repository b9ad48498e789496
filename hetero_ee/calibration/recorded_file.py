"""What is known of a store, in one file beside it: 32 bytes of SHA-256, then the safetensors file that they are the
checksum of. Its array "record" is JSON, the others are the caller's. Nothing that is read is trusted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.tensor_files import Arrays, checksummed, parsed_checksummed, read_whole
from hetero_ee.errors import StoreError
from hetero_ee.hub.regular_file import find_file
from hetero_ee.weights.store.filesystem import FileSystem, replace_file, store_errors
from hetero_ee_profiles.records import from_json, to_json

Record = TypeVar("Record")


def write_recorded(
    record: object, arrays: Mapping[str, NDArray[Any]], file: Path, files: FileSystem | None = None
) -> None:
    """Whole or not at all, replacing what was there. Raises StoreError, DiskFullError."""
    content = {"record": np.frombuffer(to_json(record).encode(), np.uint8), **arrays}
    with store_errors(file):
        replace_file(file, checksummed(content), files or FileSystem())


def read_recorded(kind: type[Record], file: Path, max_bytes: int, what: str) -> tuple[Record, Arrays] | None:
    """Record and other arrays, None where the file is not there. Raises StoreError for one that can't be read,
    ValueError for one that holds no such record."""
    found = find_file(file.parent, file.name, StoreError)
    if found is None:
        return None
    arrays = parsed_checksummed(read_whole(found, max_bytes, what))
    if "record" not in arrays:
        raise ValueError("it has no record")
    record = arrays.pop("record")
    if record.dtype != np.uint8:
        raise ValueError("its record is of another type")
    return from_json(kind, record.tobytes().decode()), arrays


def require_version(version: object, known: int) -> None:
    """Raises ValueError for a record of a version that this engine doesn't read."""
    if version != known:
        raise ValueError(f"it has format version {version!r}, this engine reads {known}")
