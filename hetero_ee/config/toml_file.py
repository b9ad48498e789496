"""The configuration file: where it lies, and its keys as TOML gives them."""

import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from hetero_ee.errors import UsageError, shown

APPLICATION = "hetero_ee"
CONFIG_VARIABLE = "HETERO_EE_CONFIG"
MAX_FILE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A configuration file that may not be there; one that was asked for by name must be."""

    path: Path
    is_required: bool

    @classmethod
    def chosen(cls, environment: Mapping[str, str]) -> "TomlFile":
        """The file HETERO_EE_CONFIG names, else config.toml in the platform's configuration folder."""
        named = environment.get(CONFIG_VARIABLE)
        if named:
            return cls(expanded(named, CONFIG_VARIABLE), is_required=True)
        return cls(platformdirs.user_config_path(APPLICATION) / "config.toml", is_required=False)

    def read(self) -> dict[str, Any]:
        """Its keys; none where there is no file and none was asked for. Raises UsageError."""
        try:
            data = self._data()
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            raise UsageError(f"{self._described} can't be read ({_reason(error)}).") from error
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{self._described} has more than {MAX_FILE_BYTES // 2**10} KiB.")
        try:
            return tomllib.loads(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UsageError(f"{self._described} is not UTF-8 text at byte {error.start}.") from error
        except RecursionError as error:
            raise UsageError(f"{self._described} is nested too deeply.") from error
        except ValueError as error:  # tomllib's own, and Python's for integers of more than 4300 digits
            raise UsageError(f"{self._described} is not TOML: {error}.") from error

    def _data(self) -> bytes:
        """The beginning of the file, at most a byte more than is allowed."""
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError:
            if self.is_required:
                raise
            return b""
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):  # /dev/null is a way to have no file; a pipe might block
            raise IsADirectoryError("it is no file")
        with self.path.open("rb") as source:
            return source.read(MAX_FILE_BYTES + 1)

    @property
    def _described(self) -> str:
        return f"{CONFIG_VARIABLE} names {self.path}, which" if self.is_required else f"the configuration {self.path}"


def expanded(text: str, source: str) -> Path:
    """The path with ~ replaced. Raises UsageError."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source} is {shown(text)}, and there is no such home folder.") from error


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
