"""Distinguish folders from Hugging Face ids, and validate ids before they are used in paths."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hetero_ee.config import demo_model_folder
from hetero_ee.errors import UsageError, shown
from hetero_ee.hub.gguf.header import is_gguf
from hetero_ee.hub.model_files import NO_DEVICE
from hetero_ee.options.engine import MODEL_OPTIONS

CACHED_PREFIX = "models--"  # of a model's folder in the cache of huggingface_hub
MAX_REVISION_LENGTH = 200
# Stricter than huggingface_hub, since names and revisions become paths in the cache.
_NAME = NO_DEVICE + r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"(?!.*(?:--|\.\.|\.git$))(?:{_NAME}/)?{_NAME}")
_REVISION_PART = NO_DEVICE + r"[A-Za-z0-9_](?:[A-Za-z0-9._+-]*[A-Za-z0-9_+-])?"
_REVISION = re.compile(rf"(?!.*\.\.){_REVISION_PART}(?:/{_REVISION_PART})*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelId:
    """A model on the Hugging Face Hub and its revision. Its name is `org/name`, or a single name for early models."""

    name: str
    revision: str = "main"

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.name):
            why = "it is not a Hugging Face id either"
            if ":" in self.name:  # such as Ollama's names
                why = "names with a colon are not Hugging Face ids, which have the form org/name"
            raise UsageError(
                f"there is no folder {shown(self.name)}, and {why}; give a folder, or an id such as Qwen/Qwen3-4B."
            )
        if not _is_revision(self.revision):
            raise UsageError(
                MODEL_OPTIONS["revision"], f" is {shown(self.revision)}; expected a branch, a tag or a commit."
            )


def is_commit(text: object) -> bool:
    """Return whether `text` is the full hash of a git commit."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def local_folder(model: str | Path | None) -> Path | None:
    """Return the folder or GGUF file that `model` names; None for a string that can only be an id.

    A `model` of None stands for the demo model.

    Raises:
        UsageError: if `model` is a path and no such folder or GGUF file exists.
    """
    if model is None:
        return demo_model_folder()
    if not isinstance(model, str | Path):
        raise UsageError(f"the model is {shown(model)}; expected a folder or a Hugging Face id.")
    folder = _expanded(model)
    if model != "" and _exists(folder):
        if not folder.is_dir() and not is_gguf(folder):
            raise UsageError(f"{folder} is a file, and not GGUF; give the folder with config.json and the weights.")
        return folder
    if isinstance(model, Path) or _is_path(model):
        raise UsageError(
            f"there is no folder {folder}; give one with a Hugging Face checkpoint, a store, a GGUF file, "
            "or a Hugging Face id such as Qwen/Qwen3-4B."
        )
    return None


def model_name(folder: Path) -> str:
    """Return the folder's name; for a downloaded model, whose folder is named by its commit, the Hugging Face id."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    is_snapshot = folder.parent.name == "snapshots" and repository.startswith(CACHED_PREFIX)
    return repository.removeprefix(CACHED_PREFIX).replace("--", "/") if is_snapshot else folder.name


def _expanded(model: str | Path) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~name of a user who doesn't exist
        return Path(model)


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except (OSError, ValueError):  # a name too long for any folder, or with a NUL
        return False


def _is_path(model: str) -> bool:
    if model.lower().endswith(".gguf"):
        return True
    return model.startswith((".", "~", "/")) or model.count("/") > 1 or (os.sep != "/" and os.sep in model)


def _is_revision(text: object) -> bool:
    return isinstance(text, str) and len(text) <= MAX_REVISION_LENGTH and _REVISION.fullmatch(text) is not None
