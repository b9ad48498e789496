"""Wraps the disk operations of store writers, so that tests can inject a full disk or a lost write."""

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
UNFINISHED_SUFFIX = ".new"  # of a file or folder that is renamed once it is complete
POLL_S = 0.1  # between two attempts of a process that waits for a lock
REMOVED_LOCKS = 3  # attempts after finding a lock held whose file is gone
ELSEWHERE = "set HETERO_EE_CACHE_DIR to a folder on another disk"


class FileSystem:
    """Disk operations for writing a store. Every method raises OSError like the function that it wraps.

    Subclasses in tests fail or lose data, as disks do.
    """

    def create_folder(self, folder: Path) -> None:
        """Create one folder in an existing one. Raises: FileExistsError: if anything has this path."""
        folder.mkdir()

    def create_file(self, file: Path) -> BinaryIO:
        """Open a new file for unbuffered writing. Raises: FileExistsError: if anything, even a link, has this path."""
        return self._opened(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb")

    def reopen_file(self, file: Path) -> BinaryIO:
        """Open a file for unbuffered reading and writing. Refuses links, special files and files with several names."""
        opened = self._opened(file, os.O_RDWR, "r+b")
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            opened.close()
            raise OSError(errno.EMLINK, "no plain file, or one with another name", str(file))
        return opened

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Write all of the data at the file's position."""
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def truncate(self, file: BinaryIO, n_bytes: int) -> None:
        file.truncate(n_bytes)

    def allocate(self, file: BinaryIO, n_bytes: int) -> None:
        """Reserve disk space for the first `n_bytes` of the file, if the file system supports it."""
        if not n_bytes or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def close_durably(self, file: BinaryIO) -> None:
        """Flush the file to the disk itself (fsync) and close it, even if the flush fails."""
        try:
            file.flush()
            os.fsync(file.fileno())
        finally:
            file.close()

    def sync_folder(self, folder: Path) -> None:
        """Flush the folder's entries to the disk (fsync), so that they survive a crash."""
        if os.name == "nt":
            return  # Windows keeps directory entries durable by itself and refuses to open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in UNSUPPORTED:  # some network disks can't fsync a folder
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
        """Wait until no other process or thread holds the file's lock. Calls `waiting` once if it has to wait.

        The lock is released when its process ends, at the latest.
        """
        import filelock

        lock, n_missed, is_waiting = filelock.FileLock(file, fallback_to_soft=False), 0, False
        while True:
            try:
                lock.acquire(timeout=POLL_S if is_waiting else 0)
            except filelock.Timeout:
                if not file.is_file():
                    n_missed += 1
                    if n_missed > REMOVED_LOCKS:  # a file that can't be created looks like a held lock
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from None
                elif not is_waiting:
                    is_waiting = True
                    waiting()
                continue
            descriptor = lock._context.lock_file_fd
            with suppress(FileNotFoundError):
                if descriptor is not None and os.path.samestat(file.stat(), os.fstat(descriptor)):
                    return lock
            lock.release()  # its last holder has removed this file

    def _opened(self, file: Path, flags: int, mode: str) -> BinaryIO:
        """Open a file, but never through a link, so that no file outside the store is written to."""
        descriptor = os.open(file, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)
        opened = os.fdopen(descriptor, mode, buffering=0)
        return opened  # type: ignore[return-value]  # a raw file, whose write may stop early


def holds_only(folder: Path, names: Collection[str]) -> bool:
    """Return whether `folder` is a real folder, not a link, and holds only regular files with these names."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return False
    with os.scandir(folder) as found:
        return all(each.name in names and each.is_file(follow_symlinks=False) for each in found)


def allocated_bytes(status: os.stat_result) -> int:
    """Return the disk space that a file uses; on Windows, which doesn't report it, the file's size."""
    n_blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if n_blocks is None else 512 * n_blocks


def write_whole(file: Path, content: bytes | memoryview, files: FileSystem) -> None:
    """Write a new file and flush it to the disk. Raises: OSError."""
    opened = files.create_file(file)
    try:
        files.write(opened, content)
    finally:
        files.close_durably(opened)


def replace_file(file: Path, content: bytes, files: FileSystem, mark: str = "") -> None:
    """Replace the file's content, completely or not at all. Creates missing folders.

    Args:
        mark: Part of the temporary name until the file is complete. Only one process at a time may use a mark.

    Raises:
        OSError: The disk refuses.
    """
    unfinished = file.with_name(f"{file.name}{mark}{UNFINISHED_SUFFIX}")
    make_folders(file.parent, files)
    remove_if_there(unfinished, files)  # left by a killed process
    try:
        write_whole(unfinished, content, files)
        if os.name == "nt":  # renaming doesn't replace files on Windows
            remove_if_there(file, files)
        files.rename(unfinished, file)
    except BaseException:
        with suppress(OSError):  # only the first error matters
            remove_if_there(unfinished, files)
        raise


def remove_if_there(file: Path, files: FileSystem) -> None:
    if os.path.lexists(file):
        files.remove_file(file)


@contextmanager
def store_errors(target: Path) -> Iterator[None]:
    """Convert OSErrors that occur while `target` is written to the engine's errors."""
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
    """Keep other processes and threads from writing or removing the store `target`. Raises: StoreError."""
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
        try:
            with suppress(OSError):
                Path(lock.lock_file).unlink()  # while it is held, so that no other process holds the same file
        finally:
            with suppress(OSError):  # the store is what matters; the lock ends with this process
                lock.release()


def make_folders(folder: Path, files: FileSystem) -> None:
    """Create the folder and its missing parents, and flush each to the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):  # another process may create it at the same time
            files.create_folder(each)
        files.sync_folder(each.parent)
