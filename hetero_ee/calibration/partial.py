"""What an unfinished calibration has measured so far, in one file, so that a killed run can be gone on with.

The file is 32 bytes of SHA-256 and the safetensors file that they are the checksum of. It is replaced as a whole. One
of another run, by its identity, or damaged in any way counts as none.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_ee.calibration.tensors import parsed_safetensors, read_whole, safetensors_bytes, write_whole
from hetero_ee.errors import StoreError
from hetero_ee.hub.regular_file import find_file
from hetero_ee.weights.store.filesystem import FileSystem, make_folders, store_errors

TYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "I64": np.int64, "BOOL": np.bool_, "U8": np.uint8}
IDENTITY = "identity"
CHECKSUM_BYTES = 32
MAX_FILE_BYTES = 64 * 2**30

Arrays = dict[str, NDArray[Any]]


class PartialCalibration:
    """The file of a run that `identity`, hexadecimal, tells from all others. Raises StoreError, DiskFullError."""

    def __init__(self, file: Path, identity: str, files: FileSystem) -> None:
        self._file, self._files = file, files
        self._unfinished = file.with_name(f"{file.name}.new")
        self._identity = np.frombuffer(bytes.fromhex(identity), np.uint8)

    @property
    def exists(self) -> bool:
        return os.path.lexists(self._file)

    def load(self) -> Arrays:
        """What was saved last, nothing where that is another run's or damaged."""
        file = find_file(self._file.parent, self._file.name, StoreError)
        if file is None:
            return {}
        data = read_whole(file, MAX_FILE_BYTES, "an unfinished calibration")
        checksum, content = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
        if hashlib.sha256(content).digest() != checksum:
            return {}
        try:
            arrays = parsed_safetensors(content, TYPES)
        except ValueError:
            return {}
        is_ours = np.array_equal(arrays.pop(IDENTITY, np.zeros(0)), self._identity)
        return arrays if is_ours else {}

    def save(self, arrays: Arrays) -> None:
        """Replaces what was saved before."""
        content = safetensors_bytes(arrays | {IDENTITY: self._identity})
        with store_errors(self._file):
            make_folders(self._file.parent, self._files)
            self._remove(self._unfinished)
            try:
                write_whole(self._unfinished, hashlib.sha256(content).digest() + content, self._files)
                if os.name == "nt":  # renaming replaces nothing there
                    self._remove(self._file)
                self._files.rename(self._unfinished, self._file)
            except BaseException:
                self._remove(self._unfinished)
                raise

    def remove(self) -> None:
        """Ends it: the calibration is whole."""
        with store_errors(self._file):
            self._remove(self._file)

    def _remove(self, file: Path) -> None:
        if os.path.lexists(file):
            self._files.remove_file(file)
