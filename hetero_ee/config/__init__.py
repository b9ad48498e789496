"""Read settings from the environment and a file, and find the folders that they name."""

import warnings
from collections.abc import Callable

from hetero_ee.config.settings import cache_folder, data_folder, demo_model_folder

__all__ = [
    "BYTE_STAGES",
    "COMPILING",
    "CONVERTING",
    "DOWNLOADING",
    "READING",
    "Progress",
    "cache_folder",
    "data_folder",
    "demo_model_folder",
    "warner",
]

Progress = Callable[[str, int, int], None]  # (stage, done, total), called during long work
READING = "Reading the prompt"  # the stage of a prompt
COMPILING = "Compiling the CPU kernels"
CONVERTING, DOWNLOADING = "Converting the weights", "Downloading"  # prefixes of stages counted in bytes
BYTE_STAGES = (CONVERTING, DOWNLOADING)


def warner(progress: Progress | None) -> Callable[[str], None]:
    """Return a function that passes warnings and notices to `progress`, or to Python's warnings if it is None."""
    if progress is None:
        return lambda text: warnings.warn(f"{text.removesuffix('.')}.", stacklevel=2)
    return lambda text: progress(text, 0, 0)
