"""Frozen dataclasses as JSON files.

Reading trusts nothing: every field has to be present, of its type, and known. msgspec converts the values; the values
that a dataclass itself refuses are refused by its `__post_init__`, with a ValueError. A dataclass with a static method
`check_version` gets its `version` checked before everything else, since other versions may have other fields. Fields
named in `ADDED_FIELDS` may be missing, because older files lack them. Fields named in `REMOVED_FIELDS` may be present,
because older files have them, if they have one of the values listed there.
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
    """Return the record as an indented JSON document. Raises: ValueError: for NaN and infinity."""
    return json_text(dataclasses.asdict(record))


def json_text(body: Any) -> str:
    """Return an indented JSON document. Raises: ValueError: for NaN and infinity."""
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Return the record of type `kind` in `text`. Raises: ValueError: in one line that names the field."""
    try:
        return from_values(kind, json.loads(text, **STRICT))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def from_values(kind: type[T], body: Any) -> T:
    """Return the record of type `kind` that the parsed JSON `body` describes. Raises: ValueError: as in from_json."""
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
    """Return the record that `file` holds. Raises: OSError, ValueError."""
    with open_regular(file) as opened:
        data = opened.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return from_json(kind, data.decode("utf-8"))


def write_record(record: Any, file: Path) -> None:
    """Write the record's JSON to `file`, completely or not at all. Raises: OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(to_json(record), file)


def write_whole(text: str, file: Path) -> None:
    """Write the text to `file`, completely or not at all. Raises: OSError."""
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
    """Return text of a class that checks it. Raises: ValueError: by that class. TypeError: if it is not text."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.{MAX_SHOWN}}")
    return kind(value)


def _problem(message: str) -> str:
    """Reword msgspec's message, so that the field comes first."""
    what, _, place = message.partition(" - at `$")
    path = place.removesuffix("`").removeprefix(".")
    if what.startswith(MISSING):
        return f"{_inside(path, what.removeprefix(MISSING).removesuffix('`'))} is missing"
    return f"{path or 'it'}: {what[0].lower()}{what[1:]}"


def _check_fields(value: Any, body: Any, path: str) -> None:
    """Check that the JSON has every field of the converted `value`, and no others, which msgspec ignores."""
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
    """Make a JSON object's dict. Raises: ValueError: if it has a field twice."""
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
    """Refuse NaN and Infinity, which Python's JSON would read. Raises: ValueError."""
    raise ValueError(f"{name} is not a number")


STRICT: dict[str, Any] = {  # keywords of json.loads
    "object_pairs_hook": unique_fields,
    "parse_constant": refuse_constant,
    "parse_float": finite_number,
}
