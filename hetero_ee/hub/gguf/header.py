"""Read the header of a GGUF file, checking every number before anything is mapped or allocated.

A file is "GGUF", a version, the numbers of tensors and of metadata entries; the metadata, each a key, a type and a
value; for each tensor its name, sizes, type and offset; and, from an aligned byte on, the tensors. All numbers are
little-endian. Source: the GGUF specification, docs/gguf.md in ggml's repository.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

from hetero_ee.errors import CheckpointError, ModelError, shown
from hetero_ee.hub.gguf.tensor_types import TENSOR_TYPES, TensorType
from hetero_ee.hub.json_text import stand_in
from hetero_ee.hub.regular_file import reason_of
from hetero_ee_profiles.opened_file import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 counted in 32 bits, for some weeks in 2023
START_BYTES = 64  # enough to recognize other kinds of files
MAX_HEADER_BYTES = 256 * 2**20  # the largest published ones have about 20 MB, nearly all of it vocabulary
MAX_TENSORS = 200_000
MAX_ENTRIES = 2**16  # of metadata; published files have up to a hundred
MAX_VALUES = 4 * 10**6  # in all metadata arrays; the largest published vocabularies need a million
MAX_KEY_BYTES = 2**16 - 1  # in the specification
MAX_TEXT_BYTES = 16 * 2**20
MAX_TENSOR_NAME_BYTES = 512  # ggml uses up to 64
MAX_DIMENSIONS = 4
MAX_INTEGER = 2**63 - 1  # torch's largest size
MAX_ALIGNMENT = 2**16
DEFAULT_ALIGNMENT = 32
TEXT, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # of a text
# struct's format of each number type; 7 is a boolean, a byte that is 0 or 1
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Description of a tensor in the header of a GGUF file."""

    file: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]  # rows first, as in torch
    start: int  # byte offset in its file
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file, or the joined headers of a model's parts under the metadata of the first."""

    file: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    header_bytes: Mapping[Path, int] = field(default_factory=dict)  # of each file

    @property
    def architecture(self) -> Value | None:
        """The name that begins the keys of the model's metadata; a string in every supported file."""
        return self.metadata.get("general.architecture")

    def get(self, key: str) -> Any:
        """Return the metadata value whose key is the architecture's name and `key`, None if it is missing."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def each(self, key: str, n_layers: Any) -> list[Any]:
        """Return a metadata value for each layer: the same one, or those in the file. Raises: ModelError."""
        value = self.get(key)
        is_count = type(n_layers) is int and n_layers <= len(self.tensors)  # a list of more would need the memory
        values = value if isinstance(value, list) else [value] * (n_layers if is_count else 0)
        if len(values) != n_layers:
            raise self.failure(f"{self.architecture}.{key} has {len(values)} values, expected one for each layer")
        return values

    def even(self, key: str) -> Any:
        """Return a metadata value. If the file has one per layer, all must be equal. Raises: ModelError."""
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.failure(f"{self.architecture}.{key} differs from layer to layer, which is not supported")
            return value[0]
        return value

    def needed(self, key: str) -> Any:
        value = self.even(key)
        if value is None:
            raise self.failure(f"{self.architecture}.{key} is missing")
        return value

    def failure(self, what: str) -> ModelError:
        return ModelError(f"{self.file}: {what}.")


def is_gguf(file: Path) -> bool:
    """Return whether an existing file begins like a GGUF file or is named like one."""
    try:
        with open_regular(file) as opened:
            return opened.read(len(MAGIC)) == MAGIC or file.suffix.lower() == ".gguf"
    except OSError:
        return False


def read_gguf_header(file: Path, n_file_bytes: int | None = None) -> GgufHeader:
    """Read the header of a GGUF file, which holds a whole model or a part of one.

    Args:
        n_file_bytes: size of the complete file, if `file` holds only its beginning. None: `file` is complete.

    Raises:
        CheckpointError: names the file and the reason.
    """
    try:
        with open_regular(file) as opened:
            n_present_bytes = os.fstat(opened.fileno()).st_size
            n_file_bytes = n_present_bytes if n_file_bytes is None else n_file_bytes
            start = opened.peek(START_BYTES)[:START_BYTES]
            if not start.startswith(MAGIC):
                raise CheckpointError(f"{file} {stand_in(start) or _damaged('it does not begin with GGUF')}.")
            cursor = _Cursor(opened, min(n_present_bytes, MAX_HEADER_BYTES))
            metadata, tensors = _parsed(cursor, file, n_file_bytes)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read ({reason_of(error)}).") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {_damaged(error)}.") from error
    return GgufHeader(file, metadata, tensors, {file: cursor.position})


def tensor_bytes(tensor: GgufTensor) -> bytearray:
    """Read a tensor's bytes. Doesn't map the file: a process that reads beyond the end of a mapped file is killed.

    Raises:
        CheckpointError: if the file can't be read, or was cut short after its header was read.
    """
    data = bytearray(tensor.n_bytes)
    try:
        with open_regular(tensor.file) as opened:
            opened.seek(tensor.start)
            n_read = opened.readinto(data)
    except OSError as error:
        raise CheckpointError(f"{tensor.file} can't be read ({reason_of(error)}).") from error
    if n_read < tensor.n_bytes:
        raise CheckpointError(f"{tensor.file} was cut short while it was read; get the file again.")
    return data


def _damaged(reason: object) -> str:
    return f"is damaged or not a GGUF file ({reason}); get the file again"


class _Cursor:
    """Reads the header sequentially. Raises ValueError instead of reading beyond the header's end."""

    def __init__(self, opened: BufferedReader, n_bytes: int) -> None:
        self._opened, self._n_bytes, self.position, self._values_left = opened, n_bytes, 0, MAX_VALUES

    def take(self, n_bytes: int) -> bytes:
        self.position += n_bytes
        data = self._opened.read(n_bytes) if self.position <= self._n_bytes else b""
        if len(data) != n_bytes:
            raise ValueError(f"its header leads beyond byte {self._n_bytes}")
        return data

    def number(self, letter: str) -> int:
        """Read an integer. `letter` is its format in the struct module."""
        size = struct.calcsize(f"<{letter}")
        value: int = struct.unpack(f"<{letter}", self.take(size))[0]
        return value

    def count(self, what: str, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise ValueError(f"it has {value} {what}, expected at most {most}")
        return value

    def text(self, what: str, most_bytes: int) -> str:
        n_bytes: int = LENGTH.unpack(self.take(LENGTH.size))[0]  # `count` is too slow for 100,000 vocabulary strings
        if n_bytes > most_bytes:
            raise ValueError(f"it has {n_bytes} bytes in {what}, expected at most {most_bytes}")
        data = self.take(n_bytes)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8") from error

    def value(self, kind: int, key: str) -> Value:
        if kind == ARRAY:
            return self._array(key)
        if kind == TEXT:
            return self.text(shown(key), MAX_TEXT_BYTES)
        return self._numbers(kind, 1, key)[0]

    def _array(self, key: str) -> Value:
        kind = self.number("I")
        n_values = self.count(f"values in {shown(key)}", self._values_left)
        self._values_left -= n_values
        if kind == TEXT:
            what = shown(key)
            return [self.text(what, MAX_TEXT_BYTES) for _ in range(n_values)]
        return self._numbers(kind, n_values, key)

    def _numbers(self, kind: int, n_values: int, key: str) -> list[int] | list[float] | list[bool]:
        if kind not in NUMBERS:  # including nested arrays, which no file has
            raise ValueError(f"{shown(key)} has type {kind}, which is unknown")
        layout = f"<{n_values}{NUMBERS[kind]}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))


def _parsed(cursor: _Cursor, file: Path, n_file_bytes: int) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
    cursor.take(len(MAGIC))
    version = cursor.number("I")
    if version not in VERSIONS:
        is_big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise ValueError(
            "it is big-endian; only little-endian files are supported"
            if is_big_endian
            else f"it has version {version}, expected {' or '.join(map(str, VERSIONS))}"
        )
    n_tensors = cursor.count("tensors", MAX_TENSORS)
    metadata = _metadata(cursor, cursor.count("metadata entries", MAX_ENTRIES))
    described = [_described(cursor, file) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {shown(alignment)}, expected a power of two from 8 to {MAX_ALIGNMENT}")
    first = -(-cursor.position // alignment) * alignment
    return metadata, _placed(described, first, alignment, n_file_bytes)


def _metadata(cursor: _Cursor, n_entries: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(n_entries):
        key = cursor.text("a key", MAX_KEY_BYTES)
        if key in metadata:
            raise ValueError(f"key {shown(key)} appears twice")
        metadata[key] = cursor.value(cursor.number("I"), key)
    return metadata


def _described(cursor: _Cursor, file: Path) -> GgufTensor:
    """Read a tensor's description. Its start is still relative to the first tensor."""
    name = cursor.text("a tensor's name", MAX_TENSOR_NAME_BYTES)
    n_dimensions = cursor.number("I")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {shown(name)} has {n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    sizes = [cursor.number("Q") for _ in range(n_dimensions)]
    number, start = cursor.number("I"), cursor.number("Q")
    if number not in TENSOR_TYPES:
        raise ValueError(f"tensor {shown(name)} has type {number}, which is unknown")
    kind, n_weights = TENSOR_TYPES[number], math.prod(sizes)
    if min(sizes) < 1 or max(sizes) > MAX_INTEGER or 8 * n_weights > MAX_INTEGER:
        raise ValueError(f"tensor {shown(name)} has sizes {shown(sizes)}, which are 0 or beyond memory")
    if sizes[0] % kind.block_weights:
        raise ValueError(
            f"tensor {shown(name)} has rows of {sizes[0]}, expected a multiple of {kind.name}'s {kind.block_weights}"
        )
    n_bytes = n_weights // kind.block_weights * kind.block_bytes
    return GgufTensor(file, name, kind, tuple(reversed(sizes)), start, n_bytes)


def _placed(described: list[GgufTensor], first: int, alignment: int, n_file_bytes: int) -> dict[str, GgufTensor]:
    """Convert starts to offsets in the file and return tensors by name. Refuses overlaps and tensors beyond the end."""
    tensors: dict[str, GgufTensor] = {}
    end = first
    for tensor in sorted(described, key=lambda each: each.start):
        name, start = tensor.name, first + tensor.start
        if name in tensors:
            raise ValueError(f"tensor {shown(name)} appears twice")
        if tensor.start % alignment:
            raise ValueError(f"tensor {shown(name)} starts at {tensor.start}, expected a multiple of {alignment}")
        if start < end:
            raise ValueError(f"tensor {shown(name)} at {tensor.start} overlaps the one before")
        end = start + tensor.n_bytes
        if end > n_file_bytes:
            raise ValueError(f"tensor {shown(name)} ends at byte {end} of {n_file_bytes}; part of the file is missing")
        tensors[name] = replace(tensor, start=start)
    return tensors
