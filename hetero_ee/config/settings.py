"""Define settings, options that the environment or a file can set, and the folders that some of them name.

A flag wins over the environment, the environment over the configuration file, the file over the default.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from hetero_ee.config.toml_file import CONFIG_VARIABLE, expanded, own_folder, read_configuration_file
from hetero_ee.errors import UsageError, meant, shown
from hetero_ee.options.engine import SETTINGS
from hetero_ee.options.option import ENVIRONMENT_PREFIX, Option

FLAG, FILE, DEFAULT = "flag", "file", "default"
WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting's value and the source of the value."""

    setting: Option
    value: Any  # of the setting's type, or None
    source: str  # FLAG, FILE, DEFAULT or a variable's name


@dataclass(frozen=True, slots=True)
class Settings:
    """The sources of settings, except flags."""

    file: Path | None  # path of the file, which need not exist; None for a user without a home folder
    in_file: Mapping[str, Any] = field(default_factory=dict)  # the file's keys and values
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.in_file:
            if key not in SETTINGS:
                raise UsageError(f"{shown(key)} in {self.file} is not a setting; {meant(key, SETTINGS)}")

    def resolve(self, name: str, flag: object = None) -> Resolved:
        """Return the setting's value from the first source that has one. An empty variable counts as unset.

        Args:
            name: The setting's key.
            flag: The command line's value, None if not given.
        """
        setting = SETTINGS[name]
        if flag is not None:
            return Resolved(setting, _checked(setting, flag, setting), FLAG)
        if text := self.environment.get(setting.variable):
            return Resolved(setting, _parsed(setting, text), setting.variable)
        if name in self.in_file:
            return Resolved(setting, self._from_file(setting), FILE)
        return Resolved(setting, setting.default, DEFAULT)

    def value(self, name: str, flag: object = None) -> Any:
        """Return only the value that `resolve` returns, or raise its errors."""
        return self.resolve(name, flag).value

    def unknown_variables(self) -> list[str]:
        """Return the names of HETERO_EE_ variables that don't belong to any setting."""
        known = {CONFIG_VARIABLE, *(setting.variable for setting in SETTINGS.values())}
        return sorted(name for name in self.environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)

    def _from_file(self, setting: Option) -> Any:
        source = f"{setting.setting} in {self.file}"
        value = _checked(setting, self.in_file[setting.setting], source)
        if isinstance(value, Path) and not value.is_absolute():
            raise UsageError(f"{source} is {shown(str(value))}; give a full path, since a file is read from anywhere.")
        return value


def _checked(setting: Option, value: object, source: object) -> Any:
    """Check a value and convert it to the setting's type. Messages name the value by `source`."""
    is_text = type(value) is str and value != "" and "\0" not in value
    if setting.kind is Path and is_text:
        return expanded(str(value), str(source))
    if not (setting.allows(value) and (is_text or setting.kind is not str)):
        raise setting.refusal(value, source)
    return value


def _parsed(setting: Option, text: str) -> Any:
    """Convert the text of an environment variable to the setting's type."""
    value: object = text
    if setting.kind is int and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", text):
        value = int(text)
    elif setting.kind is bool:
        value = WORDS.get(text.strip().lower(), text)
    return _checked(setting, value, setting.variable)


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings of this process. An `environment` of None means os.environ."""
    environment = os.environ if environment is None else environment
    file, keys = read_configuration_file(environment)
    return Settings(file, keys, environment)


def cache_folder(settings: Settings | None = None) -> Path:
    """Return the folder of converted models and kernels: the setting cache_dir, else the platform's cache folder."""
    return _folder("cache_dir", platformdirs.user_cache_path, settings)


def data_folder(settings: Settings | None = None) -> Path:
    """Return the folder of measured profiles: the setting data_dir, else the platform's data folder."""
    return _folder("data_dir", platformdirs.user_data_path, settings)


def demo_model_folder() -> Path:
    """Return the folder of the small story-telling model that ships with the package."""
    return Path(__file__).parents[1] / "assets" / "demo"


def _folder(name: str, find: Callable[[str], Path], settings: Settings | None) -> Path:
    chosen: Path | None = (settings or read_settings()).value(name)
    if folder := chosen or own_folder(find):
        return folder
    raise UsageError(f"this user has no home folder; set HOME, or {SETTINGS[name].variable} to a folder.")
