"""Finds the models in a folder of models."""

from pathlib import Path

from hetero_ee.errors import UsageError
from hetero_ee.hub.gguf.header import is_gguf
from hetero_ee.hub.gguf.parts import part_names
from hetero_ee.hub.gguf.published import is_model_name
from hetero_ee.hub.model_files import CONFIG_FILE

DEPTHS = ("*", "*/*", "*/*/*")  # such as publisher/repository/file.gguf


def models_in(folder: Path) -> list[Path]:
    """Return the checkpoints, stores and GGUF files in a folder and its subfolders, sorted.

    Raises:
        UsageError: if there are none.
    """
    found = {each for depth in DEPTHS for each in folder.glob(depth) if _is_model(each)}
    if not found:
        raise UsageError(f"{folder} has no models; expected folders with {CONFIG_FILE}, or GGUF files.")
    return sorted(each for each in found if not found & set(each.parents))  # do not search inside a checkpoint's folder


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return (path / CONFIG_FILE).is_file()
    is_first = part_names(path.name)[:1] == [path.name]  # a split model is listed by its first part
    return path.suffix == ".gguf" and is_first and is_model_name(path.name) and is_gguf(path)
