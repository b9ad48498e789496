"""Read the fields of a configuration file with a type, a range, and errors that name the field."""

from collections.abc import Mapping
from typing import Any

from hetero_ee.errors import ModelError, shown

MAX_SIZE = 2**24  # far above any published width, vocabulary or context; keeps size arithmetic exact
MAX_NUMBER = 1e12  # the largest published number is a rope_theta of 1e8


class Fields:
    """The fields of a JSON object. Methods raise ModelError for invalid values; `where` begins the message."""

    def __init__(self, values: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self._values, self._where, self._defaults = values, where, defaults or {}

    def with_defaults(self, **defaults: Any) -> "Fields":
        """Return the fields with the defaults of a model class, which take precedence over a reader's defaults."""
        return Fields(self._values, self._where, defaults)

    def with_values(self, **values: Any) -> "Fields":
        """Return the same fields with these values replaced; None removes a field."""
        return Fields({**self._values, **values}, self._where, self._defaults)

    def values(self, **defaults: Any) -> dict[str, Any]:
        """Return all fields of the object, completed by those of `defaults` that it lacks."""
        return {**defaults, **self._values}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the raw value, or the default if the field is missing or null."""
        value = self._values.get(name)
        return self._defaults.get(name, default) if value is None else value

    def is_null(self, name: str) -> bool:
        return name in self._values and self._values[name] is None

    def names(self) -> list[str]:
        return list(self._values)

    def integer(self, name: str, default: int | None = None, smallest: int = 1, largest: int = MAX_SIZE) -> int:
        value = self._required(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            raise self.fail(f"{name} is {shown(value)}, expected a whole number from {smallest} to {largest}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
            raise self.fail(f"{name} is {shown(value)}, expected a number from 0 to {MAX_NUMBER:g}.")
        return float(value)

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def refuse_flag(self, name: str, what: str) -> None:
        """Raise ModelError if the flag is set. `what` describes the unsupported feature."""
        if self.flag(name, False):
            raise self.fail(f"{name} is true, and {what} is not supported.")

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(f"{name} is {shown(value)}, expected true or false.")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.fail(f"{name} is {shown(value)}, expected a string.")
        return value

    def section(self, name: str) -> "Fields":
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.fail(f"{name} is {shown(value)}, expected an object.")
        return Fields(value, f"{self._where}: {name}")

    def refuse_others(self, known: set[str]) -> None:
        """Raise ModelError if an unknown field is set, since ignoring it could change every result."""
        for name, value in self._values.items():
            if name not in known and value is not None:
                raise self.fail(f"field {shown(name)} is not supported; supported are {', '.join(sorted(known))}.")

    def fail(self, sentence: str) -> ModelError:
        return ModelError(f"{self._where}: {sentence}")

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.fail(f"field {name} is missing.")
        return value
