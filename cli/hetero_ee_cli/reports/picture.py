"""Checks and saves pictures, which need the extra [plot]."""

from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero_ee.errors import UsageError, shown
from hetero_ee.weights.store.filesystem import UNFINISHED_SUFFIX

FORMATS = {".png": "png", ".svg": "svg"}


def picture_format(file: Path) -> str:
    """Return the picture format for the file name's suffix. Raises: UsageError: for an unsupported suffix."""
    found = FORMATS.get(file.suffix.lower())
    if found is None:
        raise UsageError(f"{shown(str(file))} is not a picture; expected a name that ends in .png or .svg.")
    return found


def require_matplotlib() -> ModuleType:
    """Return matplotlib.figure. Raises: UsageError: if it is missing; the message names the extra to install."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise UsageError('pictures need matplotlib; install it with pip install "hetero-ee[plot]".') from error
    module: ModuleType = figure
    return module


def save_picture(figure: Any, file: Path) -> None:
    """Save a figure in the format of its file name, completely or not at all. Raises: UsageError: if it can't be
    written."""
    unfinished = file.with_name(file.name + UNFINISHED_SUFFIX)
    try:
        figure.savefig(unfinished, format=picture_format(file), dpi=120)
        unfinished.replace(file)
    except OSError as error:
        raise UsageError(f"the picture {file} can't be written ({error.strerror}); choose another path.") from error
    finally:
        with suppress(OSError):  # the file may not exist
            unfinished.unlink()
