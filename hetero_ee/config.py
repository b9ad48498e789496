"""Settings of the engine that come from outside the call: folders and the one environment prefix."""

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs

Progress = Callable[[str, int, int], None]  # (stage, done, in all), called while something takes its time
ENVIRONMENT_PREFIX = "HETERO_EE_"


def setting(name: str) -> str | None:
    """The environment's value of a setting (`HETERO_EE_` + name), read at call time; None where unset or empty."""
    return os.environ.get(ENVIRONMENT_PREFIX + name) or None


def cache_folder() -> Path:
    """Where converted models are kept: HETERO_EE_CACHE_DIR, else the platform's cache folder."""
    chosen = setting("CACHE_DIR")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("hetero_ee")


def demo_model_folder() -> Path:
    """The small story-telling model that ships with the package."""
    return Path(__file__).parent / "assets" / "demo"
