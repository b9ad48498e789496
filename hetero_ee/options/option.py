"""Define Option: everything that Python, the command line and the server know about one thing that users can set.

An option is declared in a field's annotation, `threads: Annotated[int, Option(...), Range(...)]`, which supplies its
name and type. This module imports nothing heavy, since shell completion reads options at every press of Tab.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from hetero_ee.errors import UsageError, shown

ENVIRONMENT_PREFIX = "HETERO_EE_"
Schema = dict[str, Any]
NO_DEFAULTS = (None, ())  # defaults that help texts do not mention


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One option. str() returns its Python keyword, by which error messages name it by default."""

    help: str
    flags: tuple[str, ...] = ()  # on the command line; empty if it has none
    _: KW_ONLY
    file_flags: tuple[str, ...] = ()  # flags that read the option's value from a file
    choices: tuple[str, ...] = ()  # the words it may be; empty allows any
    least: float | None = None
    most: float | None = None
    excludes_least: bool = False
    unit: str = ""  # of a number, for messages
    default: Any = None
    default_text: str = ""  # what a default of None amounts to
    stand_ins: Mapping[int, Any] = field(default_factory=dict)  # numbers that mean something else, as in llama.cpp
    typed: Any = None  # its type on the command line, if that is not `kind`
    metavar: str | None = None
    setting: str = ""  # its key in the settings file; empty if it can't be set there
    openai: tuple[str, ...] = ()  # its fields in OpenAI's requests, as llama-server and vLLM extend them
    responses: tuple[str, ...] = ()  # its fields in /v1/responses, if they differ
    anthropic: tuple[str, ...] = ()  # its fields in Anthropic's requests
    ollama: tuple[str, ...] = ()  # keys in `options` of ollama's requests; empty if as in OpenAI's
    name: str = ""  # its Python keyword; `options_of` sets it and `kind`
    kind: Any = str  # its type without None

    def __str__(self) -> str:
        return self.name

    @property
    def flag(self) -> str:
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def variable(self) -> str:
        """The environment variable that sets the option, if the option is a setting."""
        return ENVIRONMENT_PREFIX + self.setting.upper()

    @property
    def full_help(self) -> str:
        """The help text and the default, in one line."""
        value = f"{self.default:g}" if isinstance(self.default, float) else f"{self.default}"
        default = self.default_text or ("" if self.default in NO_DEFAULTS else value)
        return f"{self.help} [default: {default}]" if default else self.help

    @property
    def expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.kind not in (int, float):
            return "a folder" if self.kind is Path else "some text"
        edge = "above" if self.excludes_least else "from"
        largest = "" if self.most is None else f" to {self.most:.12g}" if self.kind is float else f" to {self.most}"
        what = self.unit or ("a whole number" if self.kind is int else "a number")
        return f"{what} {edge} {self.least or 0:g}{largest}"

    def allows(self, value: object) -> bool:
        """Return whether the value has this option's type and range. Works only for simple types."""
        if self.kind not in (int, float):
            return isinstance(value, self.kind) and (not self.choices or value in self.choices)
        numbers = (int,) if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, numbers):
            return False
        low, high = self.least, self.most
        # NaN fails every comparison.
        return (low is None or value > low or (value == low and not self.excludes_least)) and (
            high is None or value <= high
        )

    def check(self, value: object, called: object = None) -> None:
        """Raise a UsageError, which names the option by `called`, if the option doesn't allow the value."""
        if not self.allows(value):
            raise self.refusal(value, called)

    def refusal(self, value: object, called: object = None) -> UsageError:
        """Return the error for a value that isn't allowed. Its message states what was expected."""
        quoted = f"{value:.12g}" if self.kind is float and isinstance(value, float) else shown(value)
        return UsageError(called or self, f" is {quoted}; expected {self.expected}.")

    def fields_of(self, protocol: str) -> tuple[str, ...]:
        """Return the option's field names in requests of "openai", "responses", "anthropic" or "ollama"."""
        names: tuple[str, ...] = getattr(self, protocol)
        return names or (() if protocol == "anthropic" else self.openai)

    def schema(self, *, with_stand_ins: bool = True) -> Schema:
        if self.kind not in (int, float):
            return dict(_SCHEMAS[self.kind])
        least = min([self.least or 0, *(self.stand_ins if with_stand_ins else ())])
        schema: Schema = {"type": "integer" if self.kind is int else "number"}
        schema["exclusiveMinimum" if self.excludes_least else "minimum"] = least
        return schema if self.most is None else schema | {"maximum": self.most}


@dataclass(frozen=True, slots=True)
class Range:
    """The range of an option that is a number, written after the Option in an annotation."""

    least: float | None = None
    most: float | None = None
    unit: str = ""
    excludes_least: bool = False


@dataclass(frozen=True, slots=True)
class Requests:
    """An option's fields in HTTP requests, written after the Option in an annotation."""

    openai: tuple[str, ...] = ()
    anthropic: tuple[str, ...] = ()
    responses: tuple[str, ...] = ()
    ollama: tuple[str, ...] = ()
    stand_ins: Mapping[int, Any] = field(default_factory=dict)


Pairs = tuple[tuple[int, float], ...]
TEXT: Schema = {"type": "string"}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SCHEMAS: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    str: TEXT,
    tuple[str, ...]: {"oneOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 64}]},
    tuple[int, ...]: IDS,
    Pairs: {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
}


def is_whole(value: object, least: int, most: int | None = None) -> bool:
    """Return whether the value is a whole number from least to most. True and False are not."""
    return type(value) is int and least <= value and (most is None or value <= most)


def options_of(stated: type) -> dict[str, Option]:
    """Return, by name, the options that the annotations of a dataclass or a TypedDict declare."""
    found: dict[str, Option] = {}
    defaults = {each.name: each.default for each in fields(stated)} if is_dataclass(stated) else {}
    for name, annotation in stated.__annotations__.items():
        match getattr(annotation, "__metadata__", ()):
            case (Option() as option, *parts):
                known = {key: value for part in parts for key, value in asdict(part).items()}
                known["default"] = defaults.get(name, option.default)
                found[name] = replace(option, name=name, kind=_without_none(annotation.__origin__), **known)
    return found


def _without_none(kind: Any) -> Any:
    if get_origin(kind) is not UnionType:
        return kind
    others = [each for each in get_args(kind) if each is not NoneType]
    return others[0] if len(others) == 1 else kind
