"""Folders: the cache, the measured profiles, and the model that ships with the package."""

from pathlib import Path

import platformdirs

from hetero_ee.config.settings import Settings, read_settings
from hetero_ee.config.toml_file import APPLICATION


def cache_folder(settings: Settings | None = None) -> Path:
    """Where models and kernels are kept: the setting cache_dir, else the platform's cache folder. Raises UsageError."""
    chosen: Path | None = (settings or read_settings()).value("cache_dir")
    return chosen or platformdirs.user_cache_path(APPLICATION)


def data_folder(settings: Settings | None = None) -> Path:
    """Where measured profiles are kept: the setting data_dir, else the platform's data folder. Raises UsageError."""
    chosen: Path | None = (settings or read_settings()).value("data_dir")
    return chosen or platformdirs.user_data_path(APPLICATION)


def demo_model_folder() -> Path:
    """The small story-telling model that ships with the package."""
    return Path(__file__).parents[1] / "assets" / "demo"
