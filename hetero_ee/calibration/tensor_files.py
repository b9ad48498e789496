"""Named arrays in files: as safetensors and back, and what an unfinished calibration has measured so far."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_ee.errors import StoreError, shown
from hetero_ee.hub.regular_file import find_file, read_file, reason_of
from hetero_ee.weights.safetensors_file import LENGTH_BYTES, header_tensors
from hetero_ee.weights.store.filesystem import FileSystem, remove_if_there, replace_file, store_errors

PARTIAL_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "BOOL": np.bool_,
    "U8": np.uint8,
}
IDENTITY = "identity"
CHECKSUM_BYTES = 32
MAX_PARTIAL_BYTES = 64 * 2**30

Arrays = dict[str, NDArray[Any]]


def read_whole(file: Path, max_bytes: int, what: str) -> bytes:
    """Content of a file that find_file has found, in memory for what it has alone. Raises StoreError."""
    try:
        n_bytes = file.stat().st_size
    except OSError as error:
        raise StoreError(f"{file} can't be read ({reason_of(error)}).") from error
    return read_file(file, min(n_bytes, max_bytes), what, StoreError)


def safetensors_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as a safetensors file."""
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def parsed_safetensors(data: bytes, types: Mapping[str, Any]) -> Arrays:
    """The arrays of a safetensors file, as copies. types: NumPy's by safetensors' names. Raises ValueError."""
    n_header = int.from_bytes(data[:LENGTH_BYTES], "little")
    start = LENGTH_BYTES + n_header
    if start > len(data):
        raise ValueError("its tensors' file is cut short")
    arrays = {}
    for name, tensor in header_tensors(data[LENGTH_BYTES:start], len(data) - start).items():
        if tensor.dtype not in types:
            raise ValueError(f"tensor {shown(name)} has type {tensor.dtype}")
        offset = start + tensor.start
        arrays[name] = np.ndarray(tensor.shape, types[tensor.dtype], buffer=data, offset=offset).copy()
    return arrays


def checksummed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """32 bytes of SHA-256, and the safetensors file that they are the checksum of."""
    content = safetensors_bytes(arrays)
    return hashlib.sha256(content).digest() + content


def parsed_checksummed(data: bytes) -> Arrays:
    """What `checksummed` was given. Raises ValueError."""
    checksum, content = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if hashlib.sha256(content).digest() != checksum:
        raise ValueError("it does not match its checksum")
    return parsed_safetensors(content, PARTIAL_TYPES)


class PartialCalibration:
    """What an unfinished run has measured, in one file, so that a killed one can be resumed.

    The file is replaced as a whole. One of another run, by its hexadecimal `identity`, or damaged in any way counts as
    none. Raises StoreError, DiskFullError.
    """

    def __init__(self, file: Path, identity: str, files: FileSystem) -> None:
        self._file, self._files = file, files
        self._identity = np.frombuffer(bytes.fromhex(identity), np.uint8)

    @property
    def exists(self) -> bool:
        return os.path.lexists(self._file)

    def load(self) -> Arrays:
        """What was saved last, nothing where that is another run's or damaged."""
        file = find_file(self._file.parent, self._file.name, StoreError)
        if file is None:
            return {}
        data = read_whole(file, MAX_PARTIAL_BYTES, "an unfinished calibration")
        try:
            arrays = parsed_checksummed(data)
        except ValueError:
            return {}
        is_ours = np.array_equal(arrays.pop(IDENTITY, np.zeros(0)), self._identity)
        return arrays if is_ours else {}

    def save(self, arrays: Arrays) -> None:
        """Replaces what was saved before."""
        with store_errors(self._file):
            replace_file(self._file, checksummed(arrays | {IDENTITY: self._identity}), self._files)

    def remove(self) -> None:
        """For when the calibration is complete."""
        with store_errors(self._file):
            remove_if_there(self._file, self._files)
