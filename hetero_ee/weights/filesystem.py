"""The disk as the store's writer sees it: a seam, so that a full disk or a lost write can be injected."""

import os
import shutil
from pathlib import Path
from typing import BinaryIO, Protocol


class FileSystem(Protocol):
    """What writing a store needs of a disk. Every method raises OSError like the function it stands for."""

    def create_folder(self, folder: Path) -> None: ...

    def create_file(self, file: Path) -> BinaryIO:
        """A new file open for writing; FileExistsError where one is."""
        ...

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None: ...

    def close_durably(self, file: BinaryIO) -> None:
        """Flushes to the disk itself (fsync), then closes; closes too where that fails."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Makes the folder's entries durable."""
        ...

    def rename(self, source: Path, target: Path) -> None: ...

    def remove_tree(self, folder: Path) -> None: ...

    def free_bytes(self, folder: Path) -> int: ...


class LocalFileSystem:
    """The real disk."""

    def create_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def create_file(self, file: Path) -> BinaryIO:
        return file.open("xb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def close_durably(self, file: BinaryIO) -> None:
        try:
            file.flush()
            os.fsync(file.fileno())
        finally:
            file.close()

    def sync_folder(self, folder: Path) -> None:
        if os.name == "nt":
            return  # Windows keeps directory entries durable by itself and refuses to open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def free_bytes(self, folder: Path) -> int:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        return shutil.disk_usage(existing).free
