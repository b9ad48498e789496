"""The disk as the store's writer sees it: a seam, so that a full disk or a lost write can be injected."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from hetero_ee.errors import DiskFullError, StoreError

if TYPE_CHECKING:
    from filelock import BaseFileLock

FULL = (errno.ENOSPC, errno.EDQUOT)
UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LOCKLESS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
UNFINISHED_SUFFIX = ".new"  # of what takes a file's or folder's place once it is whole
POLL_S = 0.1  # how often a process that waits for a lock asks again
ELSEWHERE = "set HETERO_EE_CACHE_DIR to a folder on another disk"


class FileSystem:
    """What writing a store needs of a disk. Every method raises OSError like the function it stands for.

    A subclass may fail or lose what it was given, as disks do.
    """

    def create_folder(self, folder: Path) -> None:
        """One folder, in one that is there; FileExistsError where anything is."""
        folder.mkdir()

    def create_file(self, file: Path) -> BinaryIO:
        """A new file open for writing, unbuffered; FileExistsError where anything is, a link included."""
        return self._opened(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb")

    def reopen_file(self, file: Path) -> BinaryIO:
        """A file open for reading and writing, unbuffered; nothing but a plain file with no other name."""
        opened = self._opened(file, os.O_RDWR, "r+b")
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            opened.close()
            raise OSError(errno.EMLINK, "no plain file, or one with another name", str(file))
        return opened

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """All of the data, at the file's position."""
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def truncate(self, file: BinaryIO, n_bytes: int) -> None:
        file.truncate(n_bytes)

    def allocate(self, file: BinaryIO, n_bytes: int) -> None:
        """Makes sure that the file's first n_bytes have room on the disk; does nothing where the disk can't tell."""
        if not n_bytes or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def close_durably(self, file: BinaryIO) -> None:
        """Flushes to the disk itself (fsync), then closes; closes too where that fails."""
        try:
            file.flush()
            os.fsync(file.fileno())
        finally:
            file.close()

    def sync_folder(self, folder: Path) -> None:
        """Makes the folder's entries durable."""
        if os.name == "nt":
            return  # Windows keeps directory entries durable by itself and refuses to open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in UNSUPPORTED:  # some network disks know no fsync of a folder
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_file(self, file: Path) -> None:
        file.unlink()

    def remove_tree(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def free_bytes(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free

    def acquire_lock(self, file: Path, waiting: Callable[[], None]) -> "BaseFileLock":
        """Waits until no other process or thread holds the file's lock; calls `waiting` once where it has to.

        The lock ends with its process at the latest.
        """
        import filelock

        lock = filelock.FileLock(file, fallback_to_soft=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if not file.is_file():  # what can't be made looks like a lock held by another
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from None
            waiting()
            lock.acquire(poll_interval=POLL_S)
        return lock

    def _opened(self, file: Path, flags: int, mode: str) -> BinaryIO:
        """Never through a link, so that nobody's files elsewhere are written to."""
        descriptor = os.open(file, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
        opened = os.fdopen(descriptor, mode, buffering=0)
        return opened  # type: ignore[return-value]  # a raw file, whose write may stop early


def holds_only(folder: Path, names: Collection[str]) -> bool:
    """Whether this is a folder, no link to one, with nothing in it but plain files of these names."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return False
    with os.scandir(folder) as found:
        return all(each.name in names and each.is_file(follow_symlinks=False) for each in found)


def allocated_bytes(status: os.stat_result) -> int:
    """Room on the disk that a file has; its size on Windows, which tells no more."""
    n_blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if n_blocks is None else 512 * n_blocks


def write_whole(file: Path, content: bytes | memoryview, files: FileSystem) -> None:
    """A new file with this content, flushed to the disk. Raises OSError."""
    opened = files.create_file(file)
    try:
        files.write(opened, content)
    finally:
        files.close_durably(opened)


def replace_file(file: Path, content: bytes, files: FileSystem, mark: str = "") -> None:
    """The content in the file's place, whole or not at all; its folders are made. One process at a time for a mark.

    mark: in the name it has until it is whole. Raises OSError.
    """
    unfinished = file.with_name(f"{file.name}{mark}{UNFINISHED_SUFFIX}")
    make_folders(file.parent, files)
    remove_if_there(unfinished, files)  # a killed process's
    try:
        write_whole(unfinished, content, files)
        if os.name == "nt":  # renaming replaces nothing there
            remove_if_there(file, files)
        files.rename(unfinished, file)
    except BaseException:
        with suppress(OSError):  # the first error is what counts
            remove_if_there(unfinished, files)
        raise


def remove_if_there(file: Path, files: FileSystem) -> None:
    if os.path.lexists(file):
        files.remove_file(file)


@contextmanager
def store_errors(target: Path) -> Iterator[None]:
    """Turns what the disk refuses while `target` is written into the engine's errors."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFullError(
                f"{target} can't be written: its disk is full ({error}); make room there, or {ELSEWHERE}."
            ) from error
        raise StoreError(f"{target} can't be written ({error}); check that disk, or {ELSEWHERE}.") from error


@contextmanager
def store_lock(target: Path, files: FileSystem, waiting: Callable[[], None]) -> Iterator[None]:
    """Keeps other processes and threads from writing or removing the store `target`. Raises StoreError."""
    with store_errors(target):
        make_folders(target.parent, files)
        try:
            lock = files.acquire_lock(target.with_name(f"{target.name}.lock"), waiting)
        except OSError as error:
            if error.errno in LOCKLESS:
                raise StoreError(
                    f"the disk of {target.parent} has no file locks, so that two processes could write the same store; "
                    f"{ELSEWHERE}."
                ) from error
            raise
    try:
        yield
    finally:
        with suppress(OSError):  # the store is what matters; the lock ends with this process
            lock.release()


def make_folders(folder: Path, files: FileSystem) -> None:
    """The folder and those above it that are missing, each durable in the one above."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):  # another process may be at it too
            files.create_folder(each)
        files.sync_folder(each.parent)
