"""Named arrays as safetensors bytes and back, and files read and written whole, for calibrations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_ee.errors import StoreError, shown
from hetero_ee.hub.regular_file import read_file, reason_of
from hetero_ee.weights.safetensors_file import LENGTH_BYTES, header_tensors
from hetero_ee.weights.store.filesystem import FileSystem

Arrays = dict[str, NDArray[Any]]


def write_whole(file: Path, content: bytes | memoryview, files: FileSystem) -> None:
    """A new file with this content, flushed to the disk. Raises OSError."""
    opened = files.create_file(file)
    try:
        files.write(opened, content)
    finally:
        files.close_durably(opened)


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
        place = start + tensor.start
        arrays[name] = np.ndarray(tensor.shape, types[tensor.dtype], buffer=data, offset=place).copy()
    return arrays
