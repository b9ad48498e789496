"""Reads a request's body within limits, and its fields. Each error names its field."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from starlette.requests import Request

from hetero_ee.errors import shown
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.settings import ServerSettings

MAX_DEPTH = 64
T = TypeVar("T")


async def read_body(request: Request, settings: ServerSettings) -> "Fields":
    """Read and parse a request's body. Later calls return the fields that the first call read.

    Returns:
        The fields; none if the body is empty and not declared as JSON.
    """
    if not hasattr(request.state, "fields"):
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                body = await _bytes(request, settings.max_body_bytes)
            is_json = bool(body) or request.headers.get("content-type", "").startswith("application/json")
            request.state.fields = Fields(_object(body) if is_json else {})
        except TimeoutError as error:
            message = f"the body did not arrive within {settings.body_timeout_s:g} s."
            raise RequestError(message, status=408) from error
    found: Fields = request.state.fields
    return found


async def _bytes(request: Request, most: int) -> bytes:
    too_large = RequestError(f"the body has more than {most} bytes, the limit.", status=413)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large
    return bytes(body)


def json_in(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: if `text` is not JSON or is nested deeper than MAX_DEPTH.
    """
    too_deep = ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    try:
        found = json.loads(text, parse_constant=_refuse_constant)  # ValueError: numbers of thousands of digits, too
    except RecursionError as error:
        raise too_deep from error
    if _depth(found) > MAX_DEPTH:
        raise too_deep
    return found


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json_in(body.decode("utf-8"))
    except ValueError as error:  # including invalid UTF-8
        raise RequestError(f"the body is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise RequestError(f"the body is a {type(found).__name__}; expected a JSON object.")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth(value: Any) -> int:
    """Return the nesting depth of objects and lists, counted without recursion. Stops soon after MAX_DEPTH."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [each for outer in inner for each in (outer.values() if isinstance(outer, dict) else outer)]
        depth += bool(inner)
    return depth


class Fields:
    """Fields of a JSON object. A null field counts as absent."""

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        """Wrap `values`. `place` is the path of the object in the body, for messages."""
        self.values, self._place = values, place

    def text(self, name: str) -> str | None:
        return self._of(name, str, "a string")

    def flag(self, name: str) -> bool:
        return self._of(name, bool, "true or false") or False

    def whole(self, name: str) -> int | None:
        return self._of(name, int, "a whole number")

    def number(self, name: str) -> float | None:
        """Return the field, a float or an integer, as a float."""
        value = self._of(name, float, "a number")
        try:
            return None if value is None else float(value)
        except OverflowError:
            self.refuse(name, f"is {shown(value)}; expected a smaller number")

    def items(self, name: str) -> list[Any] | None:
        return self._of(name, list, "a list")

    def inner(self, name: str) -> "Fields":
        """Return the fields of a nested object, empty if the field is absent."""
        return Fields(self._of(name, dict, "an object") or {}, f"{self._place}{name}.")

    def objects(self, name: str) -> list["Fields"]:
        found = self.items(name) or []
        for index, each in enumerate(found):
            if not isinstance(each, dict):
                self.refuse(f"{name}[{index}]", f"is {shown(each)}; expected an object")
        return [Fields(each, f"{self._place}{name}[{index}].") for index, each in enumerate(found)]

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the strings of a field that is a string or a list of strings."""
        value = self.values.get(name)
        found = [value] if isinstance(value, str) else self.items(name) or []
        for index, each in enumerate(found):
            if not isinstance(each, str):
                self.refuse(f"{name}[{index}]", f"is {shown(each)}; expected a string")
        return tuple(found)

    def refuse_unless(self, name: str, harmless: Sequence[Any], why: str) -> None:
        """Raise an error unless the field's value is one of `harmless`, the values that have no effect."""
        value = self.values.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in harmless):
            self.refuse(name, f"is {shown(value)}; {why}", code="unsupported_parameter")

    def refuse(self, name: str, why: str, code: str = "invalid_value") -> NoReturn:
        """Raise an error about the field. `why` completes the sentence."""
        raise RequestError(f"{self._place}{name} {why}.", f"{self._place}{name}", code=code)

    def _of(self, name: str, kind: type[T], expected: str) -> T | None:
        value = self.values.get(name)
        if value is None or type(value) is kind or (kind is float and type(value) is int):
            return cast(T, value)
        self.refuse(name, f"is {shown(value)}; expected {expected}")
