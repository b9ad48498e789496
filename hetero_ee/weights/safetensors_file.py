"""Read the header of a safetensors file, checking every number before anything is mapped or allocated.

A file is 8 bytes with the header's length N (little-endian), N bytes of JSON, and the tensors. The header maps each
name to a type, a shape and the tensor's first and end byte among the tensors; `__metadata__` maps strings to strings.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_ee.errors import CheckpointError, shown
from hetero_ee.hub.json_text import parse_json, stand_in
from hetero_ee.hub.regular_file import reason_of
from hetero_ee_profiles.opened_file import open_regular

LENGTH_BYTES = 8
START_BYTES = 64  # enough to recognize other kinds of files
MAX_HEADER_BYTES = 32 * 2**20  # the largest published ones have a few MB
MAX_TENSORS = 200_000
MAX_VALUES = 4 * 10**6  # in the header's JSON; a tensor has about fifteen
MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8
MAX_INTEGER = 2**63 - 1  # torch's largest size
METADATA = "__metadata__"
BITS = (
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 16)
    | dict.fromkeys(("U32", "I32", "F32"), 32)
    | dict.fromkeys(("U64", "I64", "F64", "C64"), 64)
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
)
_SIGN = re.compile(rb"[\[,:][ \t\r\n]*-")  # the minus of a number, or something similar in a string
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Description of a tensor in the header of a safetensors file."""

    dtype: str  # safetensors' name of the type
    shape: tuple[int, ...]
    start: int  # relative to the first byte of the first tensor
    end: int  # the first byte after the tensor


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return a regular file's tensors by name. Raises CheckpointError with the file and the reason."""
    try:
        with open_regular(file) as opened:
            start = opened.read(START_BYTES)
            n_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
            n_data_bytes = os.fstat(opened.fileno()).st_size - LENGTH_BYTES - n_bytes
            problem = _size_problem(len(start), n_bytes, n_data_bytes)
            if problem:
                what = None if _looks_right(start, n_bytes) else stand_in(start)
                raise CheckpointError(f"{file} {what or _damaged(problem)}.")
            opened.seek(LENGTH_BYTES)
            return header_tensors(opened.read(n_bytes), n_data_bytes)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read ({reason_of(error)}).") from error
    except ValueError as error:
        raise CheckpointError(f"{file} {_damaged(error)}.") from error


def _looks_right(start: bytes, n_header_bytes: int) -> bool:
    """Return whether a file begins like safetensors. The length in front may look like another format by chance."""
    return n_header_bytes <= MAX_HEADER_BYTES and start[LENGTH_BYTES:].startswith(b"{")


def _damaged(reason: object) -> str:
    return f"is damaged or not a safetensors file ({reason}); get the file again"


def header_tensors(header: bytes, n_data_bytes: int) -> dict[str, StoredTensor]:
    """Return the tensors that a header names; they must fill `n_data_bytes` without gaps or overlaps.

    Raises:
        ValueError: with a one-line message.
    """
    if not header.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    if header.count(b'"data_offsets"') > MAX_TENSORS:
        raise ValueError(f"it holds more than {MAX_TENSORS} tensors")
    values = parse_json(
        header,
        MAX_VALUES,
        object_pairs_hook=_without_duplicates,
        parse_int=_refuse_sign if _SIGN.search(header) else None,  # a call per number is slow
        parse_float=_refuse_number,
        parse_constant=_refuse_number,
    )
    _check_metadata(values.pop(METADATA, {}))
    if len(values) > MAX_TENSORS:
        raise ValueError(f"it holds more than {MAX_TENSORS} tensors")
    tensors = {name: _tensor(name, described) for name, described in values.items()}
    _check_offsets(tensors, n_data_bytes)
    return tensors


def _size_problem(n_start_bytes: int, n_header_bytes: int, n_data_bytes: int) -> str | None:
    if n_start_bytes < LENGTH_BYTES:
        return f"it has {n_start_bytes} bytes, but the header's length needs {LENGTH_BYTES}"
    if n_header_bytes > MAX_HEADER_BYTES:
        return f"its header would have {n_header_bytes} bytes, expected at most {MAX_HEADER_BYTES}"
    if n_data_bytes < 0:
        return f"its header of {n_header_bytes} bytes is cut short"
    return None if n_header_bytes else "its header is empty"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"name {shown(name)} appears twice")
    return values


def _refuse_number(digits: str) -> Any:
    raise ValueError(f"{digits[:40]} is not a size")


def _refuse_sign(digits: str) -> int:
    return _refuse_number(digits) if digits.startswith("-") else int(digits)


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} is not an object of strings")
    for text in (*metadata, *metadata.values()):
        text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError


def _tensor(name: str, values: Any) -> StoredTensor:
    name.encode()
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise ValueError(f"a name has {len(name)} characters, expected 1 to {MAX_NAME_LENGTH}")
    if not isinstance(values, dict) or values.keys() != _FIELDS:
        raise ValueError(f"tensor {shown(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {shown(name)} has type {shown(dtype)}, which is unknown")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {shown(name)} has shape {shown(shape)}, expected up to {MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {shown(name)} is at {shown(offsets)}, expected a first and an end byte")
    n_bits = BITS[dtype]
    for size in shape:  # one by one: a 0 that follows must not hide an overflow
        n_bits *= size
        if n_bits > MAX_INTEGER:
            raise ValueError(f"tensor {shown(name)} has shape {shown(shape)}, more than memory can hold")
    if n_bits != 8 * (offsets[1] - offsets[0]):
        raise ValueError(f"tensor {shown(name)} needs {n_bits / 8:g} bytes, but is at {shown(offsets)}")
    return StoredTensor(dtype, tuple(shape), *offsets)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {int} and max(values, default=0) <= MAX_INTEGER


def _check_offsets(tensors: Mapping[str, StoredTensor], n_data_bytes: int) -> None:
    end = 0
    for start, tensor_end, name in sorted((tensor.start, tensor.end, name) for name, tensor in tensors.items()):
        if start != end:
            between = "overlaps the one before" if start < end else f"begins after a gap at {end}"
            raise ValueError(f"tensor {shown(name)} at {start} {between}")
        end = tensor_end
    if end != n_data_bytes:
        raise ValueError(f"its tensors end at byte {end} of {n_data_bytes}")
