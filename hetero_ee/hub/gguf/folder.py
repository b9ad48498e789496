"""A GGUF file, or its parts, as a model's folder: its metadata, translated into Hugging Face's files, and a note
of where it lies.

Whatever reads a model's folder then reads this one; its weights are read from the file itself.
"""

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from hetero_ee.config import cache_folder
from hetero_ee.errors import CheckpointError, ModelError, StoreError
from hetero_ee.hub.gguf.config import hf_config, hf_generation_config
from hetero_ee.hub.gguf.names import int8_matrices, zero_point_matrices
from hetero_ee.hub.gguf.parts import base_name, part_files, read_model_header
from hetero_ee.hub.gguf.tokenizer import tokenizer_files
from hetero_ee.hub.regular_file import find_file, read_file, reason_of
from hetero_ee.models.hf_config import INT8_FIELD, ZEROS_FIELD, spec_from_hf
from hetero_ee_profiles.records import from_json

FOLDERS = "gguf"  # below the cache
NOTE_FILE = "gguf.json"  # believed in there alone: elsewhere it could name any file
MAX_NOTE_BYTES = 2**23  # the most parts, with the longest paths
TRANSLATION_VERSION = 3  # another one makes every folder anew
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class _NotedFile:
    """A file as it was when it was translated."""

    file: str
    n_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path) -> Self:
        try:
            status = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file} can't be read ({reason_of(error)}).") from error
        return cls(str(file), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _Note:
    """All parts of the model."""

    files: tuple[_NotedFile, ...]

    @classmethod
    def of(cls, files: Sequence[Path]) -> Self:
        return cls(tuple(map(_NotedFile.of, files)))


def gguf_folder(file: Path, *, configuration_only: bool = False) -> Path:
    """The folder in the cache that stands for the model that `file` holds or is a part of; made where it is not there.

    configuration_only: without the tokenizer, which takes seconds to make. Raises ModelError, CheckpointError,
    StoreError.
    """
    parts = part_files(file)
    note = _Note.of(parts)
    key = hashlib.sha256(json.dumps([TRANSLATION_VERSION, asdict(note)]).encode()).hexdigest()[:16]
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in base_name(parts[0]))[:64].strip(".") or "model"
    folder = cache_folder() / FOLDERS / key / name
    has_config, has_tokenizer = (folder / NOTE_FILE).is_file(), (folder / TOKENIZER_FILE).is_file()
    if has_config and (has_tokenizer or configuration_only):
        return folder
    header = read_model_header(parts)
    config = hf_config(header)
    spec = spec_from_hf(config, str(header.file))
    config |= {INT8_FIELD: int8_matrices(header, spec), ZEROS_FIELD: zero_point_matrices(header, spec)}
    files = {} if configuration_only else tokenizer_files(header)  # tokenizer.json last: where it is, all is
    if not has_config:
        values = {"config.json": config, "generation_config.json": hf_generation_config(header)}
        noted = values | {NOTE_FILE: asdict(note)}
        files = {name: json.dumps(value, indent=1) for name, value in noted.items()} | files
    _write(folder, files)
    return folder


def gguf_files(folder: Path) -> list[Path]:
    """The files that `folder` stands for; none for every folder that gguf_folder has not made.

    Raises CheckpointError where one is another since.
    """
    try:
        is_ours = folder.resolve().is_relative_to((cache_folder() / FOLDERS).resolve())
    except (OSError, RuntimeError):
        return []
    found = find_file(folder, NOTE_FILE, CheckpointError) if is_ours else None
    if found is None:
        return []
    try:
        note = from_json(_Note, read_file(found, MAX_NOTE_BYTES, "such a note", CheckpointError).decode())
    except ValueError as error:
        raise CheckpointError(f"{found} can't be read ({error}); delete {folder}.") from error
    for noted in note.files:
        if _NotedFile.of(Path(noted.file)) != noted:
            raise CheckpointError(f"{noted.file} has changed since it was opened; open it again.")
    return [Path(noted.file) for noted in note.files]


def _write(folder: Path, files: dict[str, str]) -> None:
    """Each whole or not at all, in this order."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            partial = folder / f"{name}.{uuid.uuid4().hex[:8]}.partial"
            try:
                partial.write_bytes(text.encode())
                partial.replace(folder / name)
            finally:
                partial.unlink(missing_ok=True)
    except UnicodeEncodeError as error:
        raise ModelError(f"{folder.name}: {error}.") from error
    except OSError as error:
        raise StoreError(
            f"{folder} can't be written ({reason_of(error)}); free some space or set another cache."
        ) from error
