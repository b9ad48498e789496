"""Distinguish folders from Hugging Face ids, and validate ids before they are used in paths."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote

from hetero_ee.config import demo_model_folder
from hetero_ee.errors import UsageError, shown
from hetero_ee.hub.gguf.header import is_gguf
from hetero_ee.hub.gguf.published import is_gguf_name
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


# The part of an address after the host: a model, optionally a quantization, optionally a revision and a file.
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_PLACE = re.compile(
    r"(?P<name>[^/:]+(?:/[^/:]+)?)(?::(?P<quantization>[^/:]+))?"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?"
)
_QUANTIZATION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
EXAMPLE = "Qwen/Qwen3-4B or unsloth/Qwen3-4B-GGUF:Q4_K_M"


@dataclass(frozen=True, slots=True)
class ModelId:
    """A model on the Hugging Face Hub and its revision.

    Attributes:
        name: `org/name`, or only a name for the Hub's oldest models.
        gguf: quantization or file of a GGUF model in the repository. None: safetensors if it has any, else a default.
    """

    name: str
    revision: str = "main"
    gguf: str | None = None

    @classmethod
    def of(cls, model: str, revision: str | None = None) -> Self:
        """Read an id, `org/name:QUANTIZATION`, or the address of a model or a GGUF file on the Hub.

        Args:
            revision: branch, tag or commit. It takes precedence over a revision in an address.

        Raises:
            UsageError: if `model` is anything else.
        """
        address = _ADDRESS.match(model)
        found = _PLACE.fullmatch(re.split("[?#]", model[address.end() :])[0].rstrip("/") if address else model)
        if not found or (found["quantization"] and "/" not in found["name"]):
            return cls(model)  # __post_init__ rejects it
        file = unquote(found["file"] or "")
        if file and not is_gguf_name(file):
            raise UsageError(
                f"{shown(file)} in {found['name']} is not a GGUF file; give {found['name']}, or the address of one."
            )
        revision = unquote(found["revision"] or "main") if revision is None else revision
        return cls(found["name"], revision, file or found["quantization"])

    def __post_init__(self) -> None:
        is_named = self.gguf is None or is_gguf_name(self.gguf) or _QUANTIZATION.fullmatch(self.gguf)
        if not _ID.fullmatch(self.name) or not is_named:
            raise UsageError(f"there is no folder {shown(str(self))}, and {_why_not(self.name)}, such as {EXAMPLE}.")
        if not _is_revision(self.revision):
            raise UsageError(
                MODEL_OPTIONS["revision"], f" is {shown(self.revision)}; expected a branch, a tag or a commit."
            )

    def __str__(self) -> str:
        return self.name if self.gguf is None else f"{self.name}:{self.gguf}"


def _why_not(name: str) -> str:
    """Explain why a name is not an id, and what to give instead, as a clause for a message."""
    if "://" in name or is_address(name):
        return "it is not the address of a model or a GGUF file on huggingface.co; give one, or an id"
    if ":" in name and "/" not in name:
        return "ollama's short names are not known; give the id of the model on the Hugging Face Hub"
    return "it is not a Hugging Face id either; give a folder, or an id"


def is_address(model: str) -> bool:
    """Return whether `model` begins like an address on the Hugging Face Hub."""
    return _ADDRESS.match(model) is not None


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
            f"or a Hugging Face id such as {EXAMPLE}."
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
    if "://" in model or is_address(model):
        return False
    if model.lower().endswith(".gguf"):
        return True
    return model.startswith((".", "~", "/")) or model.count("/") > 1 or (os.sep != "/" and os.sep in model)


def _is_revision(text: object) -> bool:
    return isinstance(text, str) and len(text) <= MAX_REVISION_LENGTH and _REVISION.fullmatch(text) is not None
