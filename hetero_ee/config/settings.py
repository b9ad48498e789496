"""The settings that need not be given with each command: one table, and which source wins.

A flag wins over the environment, the environment over the configuration file, the file over the default.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_ee.config.toml_file import CONFIG_VARIABLE, expanded, read_configuration_file
from hetero_ee.errors import UsageError, meant, shown

ENVIRONMENT_PREFIX = "HETERO_EE_"
FLAG, FILE, DEFAULT = "flag", "file", "default"
AUTO, OFF = "auto", "off"  # what the setting `profile` may be
WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    name: str  # its key in the file
    kind: type  # str, int, bool or Path
    default: str | int | bool | None
    meaning: str
    default_text: str = ""  # what a default of None, or 0, amounts to
    highest: int = 0  # of an int, which begins at 0
    choices: tuple[str, ...] = ()  # of a str; none allows any

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """The meaning and the default, in a line."""
        return f"{self.meaning} [default: {self.default_text or self.default}]"

    @property
    def expected(self) -> str:
        """What its values are, for a message."""
        if self.kind is int:
            return f"a whole number from 0 to {self.highest}"
        if self.kind is bool:
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return "a folder" if self.kind is Path else "some text"

    def checked(self, value: object, source: str) -> Any:
        """The value if it is one this setting may have. source: what the message calls it. Raises UsageError."""
        if self.kind is Path and type(value) is str and value and "\0" not in value:
            return expanded(value, source)
        if type(value) is not self.kind or not self._allows(value):
            raise UsageError(f"{source} is {shown(value)}; expected {self.expected}.")
        return value

    def parsed(self, text: str, source: str) -> Any:
        """The value that an environment variable's text stands for. Raises UsageError."""
        value: object = text
        if self.kind is int and re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", text):
            value = int(text)
        elif self.kind is bool:
            value = WORDS.get(text.strip().lower(), text)
        return self.checked(value, source)

    def _allows(self, value: Any) -> bool:
        if self.kind is int:
            return 0 <= int(value) <= self.highest
        if self.kind is str:
            return value in self.choices if self.choices else value != "" and "\0" not in value
        return True


SETTINGS = (
    Setting(
        "model",
        str,
        None,
        "Folder with a checkpoint, name from hetero-ee models, or Hugging Face id.",
        default_text="demo model",
    ),
    Setting("threads", int, 0, "CPU threads; 0 uses every physical core.", highest=1024),
    Setting(
        "ctx_size",
        int,
        0,
        "Longest prompt and text, in tokens; 0 is chosen to fit and grows when a text needs it, up to the model's own.",
        highest=2**24,
    ),
    Setting(
        "quantizer",
        str,
        None,
        "codebook, search, rtn or nf4 (int4, converted once), or none (fp32).",
        default_text="the checkpoint's own bits, else codebook",
        choices=("codebook", "search", "rtn", "nf4", "none"),
    ),
    Setting(
        "profile",
        str,
        AUTO,
        "auto: plan by this machine's profile, measured for some seconds at a model's first start; off: don't plan, "
        "so that the CPU runs everything.",
        choices=(AUTO, OFF),
    ),
    Setting("offline", bool, False, "Download nothing; use what is in the cache.", default_text="false"),
    Setting(
        "cache_dir",
        Path,
        None,
        "Folder for converted models and compiled kernels.",
        default_text="the platform's cache folder",
    ),
    Setting("data_dir", Path, None, "Folder for measured profiles.", default_text="the platform's data folder"),
)
SETTING_OF = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting as the first source that has it says."""

    setting: Setting
    value: Any  # of its kind, or None
    source: str  # FLAG, FILE, DEFAULT or a variable's name


@dataclass(frozen=True, slots=True)
class Settings:
    """The sources below the flags."""

    file: Path | None  # where the file lies, or would lie; None where it can't lie anywhere
    in_file: Mapping[str, Any] = field(default_factory=dict)  # its keys and values
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UsageError for a key that is no setting."""
        for key in self.in_file:
            if key not in SETTING_OF:
                raise UsageError(f"{shown(key)} in {self.file} is no setting; {meant(key, SETTING_OF)}")

    def resolve(self, name: str, flag: object = None) -> Resolved:
        """The setting as the first source that has it says; flag: the command line's value, None where not given.

        An empty variable counts as none. Raises UsageError.
        """
        setting = SETTING_OF[name]
        if flag is not None:
            return Resolved(setting, setting.checked(flag, setting.flag), FLAG)
        if text := self.environment.get(setting.variable):
            return Resolved(setting, setting.parsed(text, setting.variable), setting.variable)
        if name in self.in_file:
            return Resolved(setting, self._from_file(setting), FILE)
        return Resolved(setting, setting.default, DEFAULT)

    def value(self, name: str, flag: object = None) -> Any:
        """The value alone. Raises UsageError."""
        return self.resolve(name, flag).value

    def unknown_variables(self) -> list[str]:
        """Variables with the prefix that mean nothing here."""
        known = {CONFIG_VARIABLE, *(setting.variable for setting in SETTINGS)}
        return sorted(name for name in self.environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)

    def _from_file(self, setting: Setting) -> Any:
        source = f"{setting.name} in {self.file}"
        value = setting.checked(self.in_file[setting.name], source)
        if isinstance(value, Path) and not value.is_absolute():
            raise UsageError(f"{source} is {shown(str(value))}; give a full path, since a file is read from anywhere.")
        return value


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process, read at call time; environment: os.environ where None. Raises UsageError."""
    environment = os.environ if environment is None else environment
    file, keys = read_configuration_file(environment)
    return Settings(file, keys, environment)
