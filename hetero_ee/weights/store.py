"""The store: one folder with int4 weights, their manifest, and the model's configuration and tokenizer files.

Written beside its final name and renamed when complete, so that a folder of that name is always whole.
"""

import glob
import hashlib
import mmap
import os
import platform
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import psutil
import torch
from torch import Tensor

from hetero_ee.errors import StoreError
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights.filesystem import FileSystem
from hetero_ee.weights.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Entry,
    Manifest,
    aligned,
    read_manifest,
)
from hetero_ee.weights.model_weights import ModelWeights, check_complete
from hetero_ee.weights.tiles import INT4_TILE_BYTES, INT8_TILE_BYTES, TILE_COLUMNS, TILE_ROWS, padded_shape
from hetero_ee.weights.weight import TileWeight

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def is_store(folder: Path) -> bool:
    """Whether `folder` claims to be a store."""
    return (folder / MANIFEST_FILE).is_file()


def copied_files(model_folder: Path) -> list[Path]:
    """The small files of a model that its store gets a copy of."""
    return [model_folder / name for name in COPIED_FILES if (model_folder / name).is_file()]


def open_store(folder: Path, spec: ModelSpec) -> ModelWeights:
    """Maps the store's weights into memory, read-only; pages are read when first used. Raises StoreError."""
    manifest = read_manifest(folder)
    buffer = _mapped(folder / WEIGHTS_FILE)
    weights = ModelWeights({}, {}, manifest.quantizer)
    for entry in manifest.entries:
        if entry.layout == "fp32":
            data = buffer[entry.offset : entry.offset + entry.data_bytes]
            weights.vectors[entry.name] = data.view(torch.float32).view(entry.shape)
        else:
            weights.matrices[entry.name] = _tile_weight(buffer, entry)
    check_complete(weights, spec, folder)
    return weights


def _mapped(file: Path) -> Tensor:
    """The file's bytes, uint8.

    Shared and read-only: of a private writable mapping Linux wants to know that all of it would fit into memory, and
    refuses stores larger than that, which are what this engine is for.
    """
    try:
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise StoreError(f"{file} can't be mapped into memory ({error}).") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nothing writes to weights
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _tile_weight(buffer: Tensor, entry: Entry) -> TileWeight:
    n_rows, n_columns = padded_shape(*entry.shape)
    grid = (n_rows // TILE_ROWS, n_columns // TILE_COLUMNS)
    tiles = buffer[entry.offset : entry.offset + entry.data_bytes]
    if entry.layout == "int4":
        tiles = tiles.view(*grid, INT4_TILE_BYTES)
    else:
        tiles = tiles.view(torch.int8).view(*grid, INT8_TILE_BYTES)
    scales = buffer[entry.scales_offset : entry.scales_offset + entry.scales_bytes].view(torch.float16)
    return TileWeight(
        tiles=tiles,
        scales=scales.view(*grid, TILE_ROWS),
        exponent=entry.exponent,
        codebook=entry.codebook,
        n_rows=entry.shape[0],
        n_columns=entry.shape[1],
    )


class StoreWriter:
    """Writes tensors one after another; used as a context manager, it leaves a whole store or nothing.

    Raises StoreError when the disk refuses.
    """

    def __init__(self, target: Path, files: FileSystem) -> None:
        self._target, self._files = target, files
        self._folder = target.with_name(f"{target.name}{_partial_suffix()}{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._entries: list[Entry] = []
        self._hash = hashlib.sha256()
        self._offset = 0
        self._finished = False
        self._output: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._guard(self._remove_abandoned)
            self._guard(lambda: self._files.create_folder(self._folder))
            self._guard(self._create_weights_file)
        except BaseException:  # __exit__ is not called for a failure in here
            self._discard()
            raise
        return self

    def _remove_abandoned(self) -> None:
        """Removes what killed conversions of this model have left: on this machine, by processes that are gone."""
        prefix = f"{self._target.name}{_partial_suffix()}"
        for folder in self._target.parent.glob(f"{glob.escape(prefix)}*"):
            process = folder.name.removeprefix(prefix).partition("-")[0]
            if process.isdecimal() and not psutil.pid_exists(int(process)):
                self._files.remove_tree(folder)

    def _create_weights_file(self) -> None:
        self._output = self._files.create_file(self._folder / WEIGHTS_FILE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self._discard()

    def _discard(self) -> None:
        """Takes back what was written. A disk that refuses even this must not hide the first error."""
        with suppress(OSError):
            if self._output is not None:
                self._output.close()
        with suppress(OSError):
            self._files.remove_tree(self._folder)

    def add_tiles(self, name: str, weight: TileWeight) -> None:
        """A quantized matrix."""
        offset = self._append(weight.tiles)
        scales_offset = self._append(weight.scales)
        layout = "int8" if weight.codebook is None else "int4"
        self._entries.append(Entry(name, layout, weight.shape, offset, scales_offset, weight.exponent, weight.codebook))

    def add_values(self, name: str, values: Tensor) -> None:
        """A tensor kept in fp32."""
        offset = self._append(values.float())
        self._entries.append(Entry(name, "fp32", tuple(values.shape), offset, 0, 0, None))

    def finish(self, model_folder: Path, quantizer: str, vocabulary_quantizer: str, source: dict[str, Any]) -> Path:
        """Copies the small files, writes the manifest last, and gives the folder its name. Returns where it lies.

        Where another process has finished the same store meanwhile, that one stays.
        """
        output = self._open_output()
        self._guard(lambda: self._files.close_durably(output))
        for file in copied_files(model_folder):
            self._write_file(file.name, file.read_bytes)
        digest = self._hash.hexdigest()
        manifest = Manifest(quantizer, vocabulary_quantizer, source, self._offset, digest, tuple(self._entries))
        self._write_file(MANIFEST_FILE, manifest.to_json)
        self._guard(lambda: self._files.sync_folder(self._folder))
        self._guard(self._give_name)
        return self._target

    def _give_name(self) -> None:
        try:
            self._files.rename(self._folder, self._target)
        except OSError:
            if is_store(self._target):
                return
            raise
        self._folder = self._target  # so that a failure from here on takes the renamed folder back
        self._files.sync_folder(self._target.parent)
        self._finished = True

    def _write_file(self, name: str, read: Callable[[], bytes]) -> None:
        def write() -> None:
            data = read()
            file = self._files.create_file(self._folder / name)
            try:
                self._files.write(file, data)
            finally:
                self._files.close_durably(file)

        self._guard(write)

    def _append(self, tensor: Tensor) -> int:
        """Writes the tensor's bytes at the next page; returns their offset."""
        data = _bytes_of(tensor)
        offset = aligned(self._offset)
        for piece in (bytes(offset - self._offset), data):
            self._hash.update(piece)
            self._guard(partial(self._files.write, self._open_output(), piece))
        self._offset = offset + data.nbytes
        return offset

    def _open_output(self) -> BinaryIO:
        assert self._output is not None, "used outside of its with-block"
        return self._output

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            raise StoreError(
                f"{self._target} can't be written ({error}); make room there, or set HETERO_EE_CACHE_DIR to a folder "
                "on another disk."
            ) from error


def _partial_suffix() -> str:
    """Marks an unfinished store; the process id and a random word follow, since one process may convert twice at once.

    The machine's name keeps containers on one disk apart.
    """
    return f".partial-{platform.node()}-"


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes as they lie in memory, without a copy where it is contiguous."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
