"""Records: single files next to a store that hold measurements of the store's weights.

A file is 32 bytes of SHA-256 and then the safetensors file with that checksum. Its array "record" is the JSON header:
the version, the key of the weights, and the fields of a frozen dataclass. Nothing that is read is trusted.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_ee.errors import StoreError, shown
from hetero_ee.hub.json_text import parse_json
from hetero_ee.hub.regular_file import find_file, read_file, reason_of
from hetero_ee.weights.safetensors_file import LENGTH_BYTES, header_tensors
from hetero_ee.weights.store.filesystem import FileSystem, replace_file, store_errors
from hetero_ee_profiles.records import STRICT, from_values, json_text

TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "BOOL": np.bool_,
    "U8": np.uint8,
}
HEADER = "record"
CHECKSUM_BYTES = 32
MAX_HEADER_VALUES = 10**6

Arrays = dict[str, NDArray[Any]]
Body = dict[str, Any]
Header = TypeVar("Header")
Made = TypeVar("Made")


class OtherWeightsError(StoreError):
    """A record was made for another model or for other weights."""


class RecordArrays:
    """The arrays of a record. Each can be taken once, so that unknown ones are noticed."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._left = dict(arrays)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._left[name].shape if name in self._left else None

    def take(self, name: str, kind: Any, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
        """Return the array called `name` and forget it. Raises: ValueError: for another type or shape, NaN or Inf."""
        found = self._left.pop(name, None)
        if found is None or found.dtype != kind or shape not in (None, found.shape):
            raise ValueError(f"its array {shown(name)} is missing, or has another type or shape")
        if not np.isfinite(found).all():
            raise ValueError(f"its array {shown(name)} has a value that is not finite")
        return found

    def drop(self, prefix: str) -> None:
        """Forget the arrays whose names begin with `prefix`."""
        self._left = {name: array for name, array in self._left.items() if not name.startswith(prefix)}

    def refuse_others(self) -> None:
        """Check that every array of the record was taken. Raises: ValueError."""
        for name in self._left:
            raise ValueError(f"its array {shown(name)} is unknown")


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[Header]):
    """A kind of record: the type of its header, its version, and words for messages."""

    header: type[Header]
    name: str
    version: int
    way_out: str  # what the user can do about a record that can't be used

    def write(
        self, file: Path, key: str, header: Header, arrays: Mapping[str, NDArray[Any]], files: FileSystem | None = None
    ) -> None:
        """Write the record for the weights `key`, completely or not at all, replacing an earlier one.

        Raises: StoreError, DiskFullError.
        """
        body = {"version": self.version, "key": key, **asdict(header)}  # type: ignore[call-overload]
        content = {HEADER: np.frombuffer(json_text(body).encode(), np.uint8), **arrays}
        with store_errors(file):
            replace_file(file, checksummed(content), files or FileSystem())

    def read(
        self,
        file: Path,
        key: str,
        max_bytes: int,
        make: Callable[[Header, RecordArrays], Made | None],
        load: Callable[[Path, int, str], tuple[Body, Arrays] | None] | None = None,
    ) -> Made | None:
        """Return the object that `make` builds from the record in `file`, None if there is no such file.

        Args:
            key: Key of the weights that the record has to belong to.
            make: Takes all arrays. Raises ValueError for a damaged record, and returns None for another model's.
            load: Reads the JSON body and the arrays of a file in another format than `load_record` reads.

        Raises:
            StoreError: The record is damaged, of another version or can't be read. The message states the way out.
            OtherWeightsError: The record was made for another model or other weights.
        """
        try:
            found = (load or load_record)(file, max_bytes, f"the {self.name}")
            if found is None:
                return None
            made = self._made(*found, file, key, make)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"the {self.name} {file} is damaged ({error}); {self.way_out} again.") from error
        if made is None:
            raise OtherWeightsError(
                f"the {self.name} {file} was made for another model or other weights; {self.way_out} for this model."
            )
        return made

    def _made(
        self, body: Body, arrays: Arrays, file: Path, key: str, make: Callable[[Header, RecordArrays], Made | None]
    ) -> Made | None:
        version = body.pop("version", None)
        if type(version) is int and version != self.version:
            raise StoreError(
                f"the {self.name} {file} has format version {shown(version)}, this engine reads version "
                f"{self.version}; {self.way_out} again."
            )
        if type(version) is not int:
            raise ValueError(f"version is {shown(version)}")
        its_key = body.pop("key", None)
        header, rest = from_values(self.header, body), RecordArrays(arrays)
        if its_key != key:
            return None
        made = make(header, rest)
        if made is not None:
            rest.refuse_others()
        return made


def load_record(file: Path, max_bytes: int, what: str) -> tuple[Body, Arrays] | None:
    """Return the JSON body and the arrays of a record, None if it doesn't exist. Raises: StoreError, ValueError."""
    data = read_if_there(file, max_bytes, what)
    if data is None:
        return None
    arrays = parsed_checksummed(data)
    header = RecordArrays(arrays).take(HEADER, np.uint8)
    del arrays[HEADER]
    return json_body(header.tobytes()), arrays


def json_body(data: bytes) -> Body:
    """Parse a JSON object. Raises: ValueError."""
    body = parse_json(data, MAX_HEADER_VALUES, **STRICT)
    if not isinstance(body, dict):
        raise ValueError("its JSON is not an object")
    return body


def read_if_there(file: Path, max_bytes: int, what: str) -> bytes | None:
    """Return the content of a file of at most `max_bytes`, None if it does not exist. Raises: StoreError.

    Uses memory only for the bytes that the file has, not for `max_bytes`.
    """
    found = find_file(file.parent, file.name, StoreError)
    if found is None:
        return None
    try:
        n_bytes = found.stat().st_size
    except OSError as error:
        raise StoreError(f"{found} can't be read ({reason_of(error)}).") from error
    return read_file(found, min(n_bytes, max_bytes), what, StoreError)


def checksummed(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Pack arrays into a safetensors file, preceded by its SHA-256 (32 bytes)."""
    from safetensors.numpy import save

    content = bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
    return hashlib.sha256(content).digest() + content


def parsed_checksummed(data: bytes) -> Arrays:
    """Check the SHA-256 and return the arrays that `checksummed` packed. Raises: ValueError."""
    checksum, content = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if hashlib.sha256(content).digest() != checksum:
        raise ValueError("it does not match its checksum")
    return parsed_safetensors(content)


def parsed_safetensors(data: bytes) -> Arrays:
    """Return the arrays of a safetensors file, as copies. Raises: ValueError."""
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if start > len(data):
        raise ValueError("its arrays are cut short")
    arrays = {}
    for name, tensor in header_tensors(data[LENGTH_BYTES:start], len(data) - start).items():
        if tensor.dtype not in TYPES:
            raise ValueError(f"its array {shown(name)} has type {tensor.dtype}")
        offset = start + tensor.start
        arrays[name] = np.ndarray(tensor.shape, TYPES[tensor.dtype], buffer=data, offset=offset).copy()
    return arrays
