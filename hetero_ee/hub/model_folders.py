"""Finds the models in a folder of models."""

import re
from pathlib import Path

from hetero_ee.errors import UsageError
from hetero_ee.hub.gguf.header import is_gguf
from hetero_ee.hub.model_files import CONFIG_FILE

DEPTHS = ("*", "*/*", "*/*/*")  # such as publisher/repository/file.gguf
NO_MODEL = re.compile(r"mmproj.*|.*-(?!0*1-of-)\d+-of-\d+\.gguf")  # image projectors, and later parts of split files


def models_in(folder: Path) -> list[Path]:
    """Return the checkpoints, stores and GGUF files in a folder and its subfolders, sorted.

    Raises:
        UsageError: if there are none.
    """
    found = {each for depth in DEPTHS for each in folder.glob(depth) if _is_model(each)}
    inside = {each for each in found if found & set(each.parents)}  # GGUF files next to a checkpoint
    if not found:
        raise UsageError(f"{folder} has no models; expected folders with {CONFIG_FILE}, or GGUF files.")
    return sorted(found - inside)


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return (path / CONFIG_FILE).is_file()
    return path.suffix == ".gguf" and not NO_MODEL.fullmatch(path.name) and is_gguf(path)
