"""Represent a GGUF file, or its parts, by a model folder in the cache.

The folder holds the metadata, translated to Hugging Face's files, and a note with the GGUF file's path. It is read like
any model folder, except that weights are read from the GGUF file itself.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hetero_ee.config import cache_folder
from hetero_ee.errors import CheckpointError, ModelError, StoreError
from hetero_ee.hub.gguf.config import hf_config, hf_generation_config
from hetero_ee.hub.gguf.header import GgufHeader
from hetero_ee.hub.gguf.names import matrix_layouts
from hetero_ee.hub.gguf.parts import base_name, part_files, read_model_header
from hetero_ee.hub.gguf.tokenizer import check_vocabulary, tokenizer_files
from hetero_ee.hub.model_files import CONFIG_FILE
from hetero_ee.hub.regular_file import find_file, read_file, reason_of
from hetero_ee.models.hf_config import LAYOUTS_FIELD, spec_from_hf
from hetero_ee_profiles.opened_file import open_regular
from hetero_ee_profiles.records import from_json

FOLDERS = "gguf"  # in the cache
NOTE_FILE = "gguf.json"  # only trusted in that folder: elsewhere it could name any file
MAX_NOTE_BYTES = 2**23  # for the most parts with the longest paths
TRANSLATION_VERSION = 6  # a new version makes every folder again
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class _NotedFile:
    """Path, size, time and header checksum of a GGUF file when it was translated."""

    file: str
    n_bytes: int
    mtime_ns: int
    header_bytes: int = 0
    sha256: str = ""  # programs that edit metadata may restore a file's time

    @classmethod
    def of(cls, file: Path, header_bytes: int = 0) -> Self:
        try:
            with open_regular(file) as opened:
                status, header = os.fstat(opened.fileno()), opened.read(header_bytes)
        except OSError as error:
            raise CheckpointError(f"{file} can't be read ({reason_of(error)}).") from error
        return cls(str(file), status.st_size, status.st_mtime_ns, header_bytes, hashlib.sha256(header).hexdigest())

    @property
    def is_current(self) -> bool:
        """Whether the file hasn't changed. A longer header would change the file's first bytes."""
        return self.of(Path(self.file), self.header_bytes) == self


@dataclass(frozen=True, slots=True)
class _Note:
    """The content of the note: all GGUF files of the model."""

    files: tuple[_NotedFile, ...]


def gguf_folder(file: Path, *, configuration_only: bool = False) -> Path:
    """Return the folder in the cache that represents the model of a file or part, creating it if necessary.

    Args:
        configuration_only: omit the tokenizer, which needs seconds to translate.

    Raises:
        ModelError, CheckpointError, StoreError: if the file is unsupported or damaged, or the cache cannot be written.
    """
    parts = part_files(file)
    identity = [TRANSLATION_VERSION, *(asdict(_NotedFile.of(part)) for part in parts)]
    folder = _folder(base_name(file), identity)
    if _is_current(folder) and (configuration_only or (folder / TOKENIZER_FILE).is_file()):
        return folder
    header = read_model_header(parts)
    config = _configuration(header)
    files = {} if configuration_only else tokenizer_files(header)  # tokenizer.json is last, so it implies the others
    is_current = _is_current(folder)  # perhaps by now, because of another process
    if not is_current:
        note = _Note(tuple(_NotedFile.of(part, header.header_bytes[part]) for part in parts))
        values = {CONFIG_FILE: config, "generation_config.json": hf_generation_config(header)}
        noted = values | {NOTE_FILE: asdict(note)}
        files = {name: json.dumps(value, indent=1) for name, value in noted.items()} | files
    _write(folder, files, replaces=not is_current)
    return folder


def configuration_folder(header: Callable[[], GgufHeader], name: str, identity: Sequence[str]) -> Path:
    """Return a cached folder that holds only a model's configuration, creating it if necessary.

    The model's files need not be on this machine.

    Args:
        header: returns the model's header; called only to create the folder.
        name: the folder's name.
        identity: strings that identify the model's content, such as digests; the folder is found by them.

    Raises:
        ModelError, StoreError: if the model is unsupported, or the cache cannot be written.
    """
    folder = _folder(name, [TRANSLATION_VERSION, *identity])
    if not (folder / CONFIG_FILE).is_file():
        found = header()
        check_vocabulary(found)
        _write(folder, {CONFIG_FILE: json.dumps(_configuration(found), indent=1)}, replaces=False)
    return folder


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files that `folder` represents; none if gguf_folder did not create it.

    Raises:
        CheckpointError: if a file has changed since the folder was created.
    """
    try:
        is_ours = folder.resolve().is_relative_to((cache_folder() / FOLDERS).resolve())
    except (OSError, RuntimeError):
        return []
    found = find_file(folder, NOTE_FILE, CheckpointError) if is_ours else None
    if found is None:
        return []
    try:
        note = _read_note(found)
    except ValueError as error:
        raise CheckpointError(f"{found} can't be read ({error}); delete {folder}.") from error
    for noted in note.files:
        if not noted.is_current:
            raise CheckpointError(f"{noted.file} has changed since it was translated; open it again.")
    return [Path(noted.file) for noted in note.files]


def _folder(name: str, identity: Sequence[Any]) -> Path:
    """Return the cache path for a model's folder: one per identity, ending with `name` in safe characters."""
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:64].strip(".") or "model"
    return cache_folder() / FOLDERS / key / name


def _configuration(header: GgufHeader) -> dict[str, Any]:
    """Translate a header to the fields of config.json, including how matrices are stored. Raises ModelError."""
    config = hf_config(header)
    spec = spec_from_hf(config, str(header.file))
    return config | {LAYOUTS_FIELD: matrix_layouts(header, spec)}


def _is_current(folder: Path) -> bool:
    try:
        return all(noted.is_current for noted in _read_note(folder / NOTE_FILE).files)
    except (CheckpointError, ValueError):  # not there, damaged, or the files are gone
        return False


def _read_note(file: Path) -> _Note:
    return from_json(_Note, read_file(file, MAX_NOTE_BYTES, "such a note", CheckpointError).decode())


def _write(folder: Path, files: dict[str, str], *, replaces: bool) -> None:
    """Write the files in order, each atomically.

    Args:
        replaces: Write those that exist, too, and first remove a tokenizer made from another header.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if replaces:
            (folder / TOKENIZER_FILE).unlink(missing_ok=True)
        for name, text in files.items():
            if not replaces and (folder / name).is_file():
                continue
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
