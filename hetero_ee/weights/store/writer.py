"""Writes a store into a partial folder next to its final path. A stopped conversion is resumed from that folder.

Every file is flushed to the disk, the manifest last. Then the folder is renamed, so that a folder with the final name
is always complete.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, DamagedStoreError, HeteroError, StoreError
from hetero_ee.hub.model_files import MAX_SMALL_FILE_BYTES, SMALL_FILES
from hetero_ee.hub.regular_file import read_file
from hetero_ee.weights.quantizers import MAX_EXPONENT, SCALE_EXPONENT
from hetero_ee.weights.rows import RowWeight
from hetero_ee.weights.store.checksums import is_written
from hetero_ee.weights.store.filesystem import FileSystem, allocated_bytes, holds_only, store_errors, write_whole
from hetero_ee.weights.store.journal import JOURNAL_FILE, journal_line, read_journal
from hetero_ee.weights.store.manifest import ROWS, WEIGHTS_FILE, CopiedFile, Entry, Manifest, aligned, version_of
from hetero_ee.weights.store.names import MANIFEST_FILE, PARTIAL_SUFFIX
from hetero_ee.weights.store.reader import copied_files, is_store, mapped_weight
from hetero_ee.weights.weight import TileWeight

STORE_FILES = {MANIFEST_FILE, WEIGHTS_FILE, JOURNAL_FILE, *SMALL_FILES}


def partial_folder(target: Path) -> Path:
    """Return the folder in which the store is written until it is complete."""
    return target.with_name(target.name + PARTIAL_SUFFIX)


def holds_only_store_files(folder: Path) -> bool:
    """Return whether this is a folder that holds only files that a conversion writes."""
    return holds_only(folder, STORE_FILES)


def lacks_manifest(folder: Path) -> bool:
    """Return whether this is a store without a manifest. A manifest that exists but can't be read isn't missing."""
    if not os.path.lexists(folder):
        return False
    return holds_only_store_files(folder) and folder / MANIFEST_FILE not in folder.iterdir()


class StoreWriter:
    """Writes tensors one after another. Use it as a context manager, under the store's lock.

    Keeps the tensors that an earlier writer with the same `identity` left, if checksums match, and lists them in
    `entries`. After one of the engine's errors nothing is left; after an interrupt the partial folder stays. All
    methods raise StoreError if the disk refuses.
    """

    def __init__(self, target: Path, files: FileSystem, identity: Mapping[str, Any]) -> None:
        self._target, self._files, self._identity = target, files, identity
        self._folder = partial_folder(target)
        self.entries: list[Entry] = []
        self._copies: list[CopiedFile] = []
        self._offset = 0
        self._finished = self._renamed = False
        self._weights: BinaryIO  # opened, like the journal, when the with-block is entered
        self._journal: BinaryIO
        self._open_files: list[BinaryIO] = []

    def __enter__(self) -> Self:
        try:
            with store_errors(self._target):
                if os.path.lexists(self._target):
                    kind = DamagedStoreError if lacks_manifest(self._target) else StoreError
                    raise kind(f"{self._target} can't be written: the path exists already, and is not a store.")
                self._open()
        except BaseException as error:  # __exit__ is not called for a failure in here
            self._leave(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._finished:
            self._leave(error)

    @property
    def allocated_bytes(self) -> int:
        """Disk space that the weights already occupy."""
        return allocated_bytes(os.fstat(self._weights.fileno()))

    def allocate(self, n_bytes: int) -> None:
        with store_errors(self._target):
            self._files.allocate(self._weights, n_bytes)

    def add_matrix(self, name: str, weight: TileWeight | RowWeight) -> None:
        """Write a quantized matrix. Raises: CheckpointError: if scales are not finite or weights impossibly large."""
        if not torch.isfinite(weight.scales).all():
            raise CheckpointError(f"tensor {name} has scales that are not finite; its weights are damaged.")
        if weight.exponent > MAX_EXPONENT:
            raise CheckpointError(
                f"tensor {name} has weights of 2^{weight.exponent + SCALE_EXPONENT} and more, beyond those of any "
                "model; it is damaged, get the checkpoint again."
            )
        layout = ROWS if isinstance(weight, RowWeight) else weight.layout
        offset, checksum = self._append(weight.codes if isinstance(weight, RowWeight) else weight.tiles)
        scales_offset, scales_checksum = self._append(weight.scales)
        format_fields = (offset, scales_offset, weight.exponent, weight.codebook)
        self._add(Entry(name, layout, weight.shape, *format_fields, checksum, scales_checksum))

    def add_values(self, name: str, values: Tensor) -> None:
        """Write a tensor in fp32."""
        offset, checksum = self._append(values.float())
        self._add(Entry(name, "fp32", tuple(values.shape), offset, 0, 0, None, checksum, ""))

    def written(self, name: str) -> TileWeight | RowWeight | None:
        """Return the matrix with this name, mapped from the disk, None if it is not written yet."""
        entry = next((each for each in self.entries if each.name == name), None)
        if entry is None:
            return None
        with store_errors(self._target):
            self._weights.flush()
        return mapped_weight(self._folder / WEIGHTS_FILE, entry)

    def copy_files(self, model_folder: Path) -> None:
        """Copy the model's small files. Raises: CheckpointError: if one is too large or can't be read."""
        for file in copied_files(model_folder):
            data = read_file(file, MAX_SMALL_FILE_BYTES, "such a file", CheckpointError)
            self._write_file(file.name, data)
            self._copies.append(CopiedFile(file.name, len(data), hashlib.sha256(data).hexdigest()))

    def finish(self, quantizer: str, vocabulary_quantizer: str, source: dict[str, Any]) -> Path:
        """Write the manifest, give the folder its final name and return it."""
        copies, entries = tuple(self._copies), tuple(self.entries)
        version = version_of(entries)
        manifest = Manifest(quantizer, vocabulary_quantizer, source, copies, self._offset, entries, version=version)
        with store_errors(self._target):
            self._cut_weights()
            self._files.close_durably(self._weights)
            self._write_file(MANIFEST_FILE, manifest.to_json())
            self._journal.close()
            self._files.remove_file(self._folder / JOURNAL_FILE)
            self._files.sync_folder(self._folder)
            self._give_name()
        self._finished = True
        return self._target

    def _open(self) -> None:
        if os.path.lexists(self._folder):
            if not holds_only_store_files(self._folder):
                raise StoreError(
                    f"{self._folder} is in the way and was not left by a conversion; move it somewhere else."
                )
            if self._resume():
                return
            self._close()
            self._files.remove_tree(self._folder)
        self._files.create_folder(self._folder)
        self._journal = self._files.create_file(self._folder / JOURNAL_FILE)
        self._open_files.append(self._journal)
        self._files.write(self._journal, journal_line(self._identity))
        self._weights = self._files.create_file(self._folder / WEIGHTS_FILE)
        self._open_files.append(self._weights)

    def _resume(self) -> bool:
        """Take over the tensors of an earlier writer. Returns False if there are none."""
        present = {file.name for file in self._folder.iterdir()}
        if not {JOURNAL_FILE, WEIGHTS_FILE} <= present:
            return False
        entries = read_journal(self._folder / JOURNAL_FILE, self._identity)
        if entries is None:
            return False
        for name in present - {JOURNAL_FILE, WEIGHTS_FILE}:  # written at the end, and soon written again
            self._files.remove_file(self._folder / name)
        self._weights = self._files.reopen_file(self._folder / WEIGHTS_FILE)
        self._open_files.append(self._weights)
        self._journal = self._files.reopen_file(self._folder / JOURNAL_FILE)
        self._open_files.append(self._journal)
        self._take_over(entries)
        return True

    def _take_over(self, entries: Sequence[Entry]) -> None:
        """Check the bytes of finished tensors, and cut weights and journal after the last intact one."""
        for entry in entries:
            if not is_written(self._weights, self._offset, entry):
                break
            self.entries.append(entry)
            self._offset = entry.regions[-1].end
        self._cut_weights()
        journal_end = len(journal_line(self._identity)) + sum(len(journal_line(entry)) for entry in self.entries)
        self._files.truncate(self._journal, journal_end)
        self._weights.seek(self._offset)
        self._journal.seek(journal_end)

    def _cut_weights(self) -> None:
        if os.fstat(self._weights.fileno()).st_size != self._offset:
            self._files.truncate(self._weights, self._offset)

    def _give_name(self) -> None:
        if os.path.lexists(self._target):
            raise FileExistsError("something else was created there meanwhile")
        try:
            self._files.rename(self._folder, self._target)
        except OSError:
            if not is_store(self._target):  # a network disk may report a failure although it renamed the folder
                raise
        self._renamed = True
        self._files.sync_folder(self._target.parent)

    def _leave(self, error: BaseException | None) -> None:
        """Keep the written tensors after an interrupt; remove them after any other error.

        If the disk refuses even this, the original error is reported.
        """
        self._close()
        if error is not None and not isinstance(error, HeteroError):
            return
        if self._renamed:
            with suppress(OSError):
                self._files.rename(self._target, self._folder)
        with suppress(OSError):
            if holds_only_store_files(self._folder):
                self._files.remove_tree(self._folder)

    def _close(self) -> None:
        for file in self._open_files:
            with suppress(OSError):
                file.close()

    def _write_file(self, name: str, data: bytes) -> None:
        with store_errors(self._target):
            write_whole(self._folder / name, data, self._files)

    def _append(self, tensor: Tensor) -> tuple[int, str]:
        """Write a tensor's bytes at the next page boundary and return their offset and checksum."""
        data = _bytes_of(tensor)
        offset = aligned(self._offset)
        with store_errors(self._target):
            for piece in (bytes(offset - self._offset), data):
                self._files.write(self._weights, piece)
        self._offset = offset + data.nbytes
        return offset, hashlib.sha256(data).hexdigest()

    def _add(self, entry: Entry) -> None:
        with store_errors(self._target):
            self._files.write(self._journal, journal_line(entry))
        self.entries.append(entry)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
