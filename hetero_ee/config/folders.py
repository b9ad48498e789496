"""Folders: the cache, the measured profiles, and the model that ships with the package."""

from collections.abc import Callable
from pathlib import Path

import platformdirs

from hetero_ee.config.settings import Settings, read_settings
from hetero_ee.config.toml_file import own_folder
from hetero_ee.errors import UsageError
from hetero_ee.options.engine import SETTINGS


def cache_folder(settings: Settings | None = None) -> Path:
    """Return the folder of models and kernels: the setting cache_dir, else the platform's cache folder.

    Raises:
        UsageError: if there is neither.
    """
    return _folder("cache_dir", platformdirs.user_cache_path, settings)


def data_folder(settings: Settings | None = None) -> Path:
    """Return the folder of measured profiles: the setting data_dir, else the platform's data folder.

    Raises:
        UsageError: if there is neither.
    """
    return _folder("data_dir", platformdirs.user_data_path, settings)


def demo_model_folder() -> Path:
    """Return the folder of the small story-telling model that ships with the package."""
    return Path(__file__).parents[1] / "assets" / "demo"


def _folder(name: str, find: Callable[[str], Path], settings: Settings | None) -> Path:
    chosen: Path | None = (settings or read_settings()).value(name)
    if folder := chosen or own_folder(find):
        return folder
    raise UsageError(f"this user has no home folder; set HOME, or {SETTINGS[name].variable} to a folder.")
