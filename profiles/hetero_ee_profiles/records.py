"""Reads and writes frozen dataclasses as JSON files.

Reading is strict: every field must be present, known and of its type. msgspec converts the values, and a dataclass
checks them in `__post_init__`, which raises ValueError. A static method `check_version` is called with the `version`
first, since other versions may have other fields. Fields in `ADDED_FIELDS` may be missing, because older files lack
them. Fields in `REMOVED_FIELDS` may be present, because older files have them, with one of the values listed there.
"""

import dataclasses
import json
import math
import os
import uuid
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hetero_ee_profiles.opened_file import open_regular

MAX_FILE_BYTES = 16 * 2**20
MAX_SHOWN = 60
MISSING = "Object missing required field `"  # how msgspec begins

T = TypeVar("T")


def to_json(record: Any) -> str:
    """Return the record as indented JSON. Raises: ValueError: if a number is NaN or infinite."""
    return json_text(dataclasses.asdict(record))


def json_text(body: Any) -> str:
    """Return a JSON value as indented text. Raises: ValueError: if a number is NaN or infinite."""
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Parse JSON text as a record of type `kind`. Raises: ValueError: one line that names the field."""
    try:
        return from_values(kind, json.loads(text, **STRICT))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def from_values(kind: type[T], body: Any) -> T:
    """Convert parsed JSON to a record of type `kind`. Raises: ValueError: one line that names the field."""
    check_version = getattr(kind, "check_version", None)
    if check_version and isinstance(body, dict) and type(body.get("version")) is int:
        check_version(body["version"])
    try:
        record = msgspec.convert(body, kind, dec_hook=_text)
    except msgspec.ValidationError as error:
        raise ValueError(_problem(str(error))) from error
    _check_fields(record, body, "")
    return record


def read_record(kind: type[T], file: Path) -> T:
    """Read a record of type `kind` from `file`. Raises: OSError, ValueError: if it can't be read or is not valid."""
    with open_regular(file) as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return from_json(kind, data.decode("utf-8"))


def write_record(record: Any, file: Path) -> None:
    """Write the record as JSON to `file`, completely or not at all. Raises: OSError: if that fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(to_json(record), file)


def write_whole(text: str, file: Path) -> None:
    """Write the text to `file`, completely or not at all. Raises: OSError: if that fails."""
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


def _text(kind: type[Any], value: Any) -> Any:
    """Convert a string to a class such as Placement. Raises: ValueError, TypeError: if it doesn't fit."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.{MAX_SHOWN}}")
    return kind(value)


def _problem(message: str) -> str:
    """Reword msgspec's message so that the field comes first."""
    what, _, place = message.partition(" - at `$")
    path = place.removesuffix("`").removeprefix(".")
    if what.startswith(MISSING):
        return f"{_inside(path, what.removeprefix(MISSING).removesuffix('`'))} is missing"
    return f"{path or 'it'}: {what[0].lower()}{what[1:]}"


def _check_fields(value: Any, body: Any, path: str) -> None:
    """Check that the JSON has every field of the converted `value` and no unknown ones, which msgspec allows."""
    if isinstance(value, tuple):
        for i, (each, entry) in enumerate(zip(value, body, strict=True)):
            _check_fields(each, entry, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value):
        names, removed = {field.name for field in dataclasses.fields(value)}, getattr(value, "REMOVED_FIELDS", {})
        for name, harmless in removed.items():
            if body.get(name) not in harmless:
                raise ValueError(f"{_inside(path, name)} is {body[name]!r:.{MAX_SHOWN}}, which is no longer supported")
        for name in sorted((names ^ body.keys()) - (names & {*getattr(value, "ADDED_FIELDS", ())}) - removed.keys()):
            raise ValueError(f"{_inside(path, name)} is {'missing' if name in names else 'unknown'}")
        for name in names & body.keys():
            _check_fields(getattr(value, name), body[name], _inside(path, name))


def _inside(path: str, name: str) -> str:
    name = name if name.isprintable() else ascii(name)
    name = name if len(name) <= MAX_SHOWN else name[: MAX_SHOWN - 3] + "..."
    return f"{path}.{name}" if path else name


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from a JSON object. Raises: ValueError: if a field occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field occurs twice")
    return found


def finite_number(text: str) -> float:
    """Parse a JSON number with a fraction or exponent. Raises: ValueError: if no float is that large."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.{MAX_SHOWN}} is not a finite number")
    return number


def refuse_constant(name: str) -> float:
    """Raise ValueError for NaN and Infinity, which Python's JSON would otherwise accept."""
    raise ValueError(f"{name} is not a number")


STRICT: dict[str, Any] = {  # keywords of json.loads
    "object_pairs_hook": unique_fields,
    "parse_constant": refuse_constant,
    "parse_float": finite_number,
}
