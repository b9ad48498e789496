"""Frozen dataclasses to JSON and back, with suspicion: every field there, of its type, and no other.

What a dataclass itself demands of its values it checks in __post_init__, by ValueError. One with a static method
`check_version` has its field `version` checked by it before anything else is asked: of another version every field may
be another. Fields named in its ADDED_FIELDS may be missing, in a file from before they were there; those in its
REMOVED_FIELDS, of a file from when they were, are ignored if they have one of the listed values.
"""

import dataclasses
import json
import math
import os
import types
import typing
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hetero_ee_profiles.opened_file import open_regular

MAX_FILE_BYTES = 16 * 2**20
MAX_SHOWN = 60

T = TypeVar("T")


def to_json(record: Any) -> str:
    """The record as an indented JSON document. Raises ValueError at NaN and infinity."""
    return json.dumps(dataclasses.asdict(record), indent=1, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """The record of type `kind` that `text` holds. Raises ValueError, in one line that names the field."""
    try:
        body = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    record: T = _read(kind, body, "")
    return record


def read_record(kind: type[T], file: Path) -> T:
    """The record that `file` holds. Raises OSError, ValueError."""
    with open_regular(file) as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return from_json(kind, data.decode("utf-8"))


def write_record(record: Any, file: Path) -> None:
    """Writes the record's JSON to `file`, whole or not at all. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(to_json(record), file)


def write_whole(text: str, file: Path) -> None:
    """Writes the text to `file`, whole or not at all. Raises OSError."""
    unfinished = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("x", encoding="utf-8") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _read(kind: Any, value: Any, path: str) -> Any:
    """`value` as `kind`; `path` is where it is in the document, for messages."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(path, value, "a list")
        item, *rest = typing.get_args(kind)
        if rest != [...] and len(value) != 1 + len(rest):
            raise _wrong(path, value, f"{1 + len(rest)} values")
        kinds = [item] * len(value) if rest == [...] else [item, *rest]
        return tuple(
            _read(each, entry, f"{path}[{i}]") for i, (each, entry) in enumerate(zip(kinds, value, strict=True))
        )
    if origin in (types.UnionType, typing.Union):
        [inner] = [choice for choice in typing.get_args(kind) if choice is not type(None)]
        return None if value is None else _read(inner, value, path)
    if kind is float:
        return _number(value, path)
    if type(value) is not kind:
        raise _wrong(path, value, kind.__name__)
    return value


def _dataclass(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    if hasattr(kind, "check_version") and type(value.get("version")) is int:
        kind.check_version(value["version"])
    hints = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    for name, harmless in getattr(kind, "REMOVED_FIELDS", {}).items():
        if value.get(name) not in harmless:
            raise ValueError(f"{_inside(path, name)} is {_shown(value[name])}, which is no longer supported")
    value = {name: value[name] for name in value.keys() - getattr(kind, "REMOVED_FIELDS", {}).keys()}
    for name in sorted((names ^ value.keys()) - (names & {*getattr(kind, "ADDED_FIELDS", ())})):
        raise ValueError(f"{_inside(path, name)} is {'missing' if name in names else 'unknown'}")
    fields = {name: _read(hints[name], value[name], _inside(path, name)) for name in names & value.keys()}
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{path or 'it'}: {error}") from error


def _number(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise _wrong(path, value, "a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise _wrong(path, "an enormous integer", "a number") from error
    if not math.isfinite(number):
        raise _wrong(path, value, "a finite number")
    return number


def _inside(path: str, name: str) -> str:
    return _shown(name, quoted=False) if not path else f"{path}.{_shown(name, quoted=False)}"


def _wrong(path: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{path or 'it'} is {_shown(value)}, expected {expected}")


def _shown(value: Any, *, quoted: bool = True) -> str:
    try:
        text = repr(value) if quoted else str(value)
    except ValueError:  # an integer of more than 4300 digits
        text = f"a very large {type(value).__name__}"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
