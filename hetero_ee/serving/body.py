"""A request's body: read within bounds, then field by field, each error naming its field."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from starlette.requests import Request

from hetero_ee.errors import shown
from hetero_ee.serving.errors import RequestError
from hetero_ee.serving.settings import ServerSettings

MAX_DEPTH = 64


async def read_body(request: Request, settings: ServerSettings) -> "Fields":
    """The fields of a JSON object. Raises RequestError where it is none, too large or too slow, ClientDisconnect."""
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return Fields(_object(await _bytes(request, settings.max_body_bytes)))
    except TimeoutError as error:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s."
        raise RequestError(message, status=408) from error


async def _bytes(request: Request, most: int) -> bytes:
    too_large = RequestError(f"the body has more than {most} bytes, the most that is taken.", status=413)
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
    """What the text says. Raises ValueError where it is no JSON, or nested deeper than MAX_DEPTH."""
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
    except ValueError as error:  # of UTF-8, too
        raise RequestError(f"the body is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise RequestError(f"the body is a {type(found).__name__}; expected a JSON object.")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


def _depth(value: Any) -> int:
    """Levels of objects and lists, counted without recursion and not far beyond MAX_DEPTH."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [each for outer in inner for each in (outer.values() if isinstance(outer, dict) else outer)]
        depth += bool(inner)
    return depth


class Fields:
    """An object's fields. null is as if it were not there."""

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        """place: of the object in the body, for messages."""
        self.values, self._place = values, place

    def text(self, name: str) -> str | None:
        value: str | None = self._of(name, str, "a string")
        return value

    def flag(self, name: str) -> bool:
        """False where it is not there."""
        return self._of(name, bool, "true or false") or False

    def whole(self, name: str) -> int | None:
        value: int | None = self._of(name, int, "a whole number")
        return value

    def number(self, name: str) -> float | None:
        """A float, also of a whole number."""
        value: float | None = self._of(name, (int, float), "a number")
        try:
            return None if value is None else float(value)
        except OverflowError:
            self.refuse(name, f"is {shown(value)}; expected a smaller number")

    def items(self, name: str) -> list[Any] | None:
        value: list[Any] | None = self._of(name, list, "a list")
        return value

    def inner(self, name: str) -> "Fields":
        """Those of an object in a field; empty where it is not there."""
        return Fields(self._of(name, dict, "an object") or {}, f"{self._place}{name}.")

    def objects(self, name: str) -> list["Fields"]:
        """Of a list of objects."""
        found = self.items(name) or []
        for index, each in enumerate(found):
            if not isinstance(each, dict):
                self.refuse(f"{name}[{index}]", f"is {shown(each)}; expected an object")
        return [Fields(each, f"{self._place}{name}[{index}].") for index, each in enumerate(found)]

    def texts(self, name: str) -> tuple[str, ...]:
        """A string, or a list of strings."""
        value = self.values.get(name)
        found = [value] if isinstance(value, str) else self.items(name) or []
        for index, each in enumerate(found):
            if not isinstance(each, str):
                self.refuse(f"{name}[{index}]", f"is {shown(each)}; expected a string")
        return tuple(found)

    def refuse_unless(self, name: str, harmless: Sequence[Any], why: str) -> None:
        """Raises RequestError where the field asks for something else than these values, which ask for nothing."""
        value = self.values.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in harmless):
            self.refuse(name, f"is {shown(value)}; {why}", code="unsupported_parameter")

    def refuse(self, name: str, why: str, code: str = "invalid_value") -> NoReturn:
        """Raises RequestError. why: the rest of the sentence."""
        raise RequestError(f"{self._place}{name} {why}.", f"{self._place}{name}", code=code)

    def _of(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.values.get(name)
        is_flag = isinstance(value, bool)
        if value is None or (isinstance(value, kind) and (kind is bool or not is_flag)):
            return value
        self.refuse(name, f"is {shown(value)}; expected {expected}")
