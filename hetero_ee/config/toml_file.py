"""Read the TOML configuration file and find its path."""

import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from hetero_ee.errors import UsageError, shown
from hetero_ee_profiles.opened_file import open_regular

APPLICATION = "hetero_ee"
CONFIG_VARIABLE = "HETERO_EE_CONFIG"
MAX_FILE_BYTES = 2**16


def read_configuration_file(environment: Mapping[str, str]) -> tuple[Path | None, dict[str, Any]]:
    """Read the file that HETERO_EE_CONFIG names, else config.toml in the platform's configuration folder.

    Returns:
        The path and the keys. There are no keys if config.toml does not exist. The path is None for a user without a
        home folder.

    Raises:
        UsageError: if the file can't be read, or HETERO_EE_CONFIG names a missing one.
    """
    if named := environment.get(CONFIG_VARIABLE):
        path = expanded(named, CONFIG_VARIABLE)
        described = f"{CONFIG_VARIABLE} names {path}, which"
    elif folder := own_folder(platformdirs.user_config_path):
        path = folder / "config.toml"
        described = f"the configuration {path}"
    else:
        return None, {}
    try:
        with open_regular(path, kinds=(stat.S_IFREG, stat.S_IFCHR)) as source:  # /dev/null is a way to have no file
            data = source.read(MAX_FILE_BYTES + 1) or b""  # None if the file is a terminal without input
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if not named and (isinstance(error, FileNotFoundError) or not is_in_sight(path)):
            return path, {}
        raise UsageError(f"{described} can't be read ({getattr(error, 'strerror', None) or error}).") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{described} has more than {MAX_FILE_BYTES // 2**10} KiB.")
    try:
        return path, tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{described} is not UTF-8 text at byte {error.start}.") from error
    except RecursionError as error:
        raise UsageError(f"{described} is nested too deeply.") from error
    except ValueError as error:  # tomllib's own, and Python's for integers of more than 4300 digits
        raise UsageError(f"{described} is not TOML: {error}.") from error


def own_folder(find: Callable[[str], Path]) -> Path | None:
    """Return this application's folder by a function of platformdirs, None for a user without a home folder."""
    try:
        folder = find(APPLICATION)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # older releases of platformdirs leave ~ in the path


def expanded(text: str, source: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source} is {shown(text)}, and there is no such home folder.") from error


def is_in_sight(path: Path | None) -> bool:
    """Return whether the operating system reports that the file exists. A home folder may be closed to this user."""
    if path is None:
        return False
    try:
        path.lstat()
    except OSError:
        return False
    return True
