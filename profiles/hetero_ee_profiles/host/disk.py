"""Describes the disk of a folder: free space, file system, and whether locks and mmap work."""

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hetero_ee_profiles.host.host import Host

NETWORK = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "drvfs", "afs", "ceph", "glusterfs")  # prefixes of their names
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class DiskInfo:
    total_bytes: int
    free_bytes: int
    kind: str  # the file system's name, such as ext4; empty if unknown

    @property
    def is_network(self) -> bool:
        return self.kind.startswith(NETWORK)

    @property
    def is_memory(self) -> bool:
        return self.kind in IN_MEMORY


def existing_folder(folder: Path) -> Path:
    """Return the folder or its nearest existing parent. Raises: OSError: if one is a file or cannot be read."""
    for candidate in (folder.absolute(), *folder.absolute().parents):
        try:
            candidate.stat()
        except FileNotFoundError:
            continue
        return candidate
    return Path(folder.absolute().anchor)


def disk_info(host: Host, folder: Path) -> DiskInfo:
    """Describe the disk that holds `folder`, which need not exist yet. Raises: OSError: if it cannot be read."""
    existing = existing_folder(folder)
    usage = shutil.disk_usage(existing)
    return DiskInfo(usage.total, usage.free, _kind(host, os.path.realpath(existing)))


def try_disk(folder: Path) -> None:
    """Test that files in `folder`, or its nearest existing parent, can be written, mapped and locked.

    Raises:
        OSError: if one of these does not work; the message says which.
    """
    with tempfile.TemporaryDirectory(prefix=".hetero-ee-check-", dir=existing_folder(folder)) as name:
        _try_mmap(Path(name, "mapped"))
        _try_lock(Path(name, "lock"))


def _try_mmap(path: Path) -> None:
    written = os.urandom(2 * mmap.PAGESIZE)
    path.write_bytes(written)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            read = mapped[:]
    except (OSError, ValueError) as error:
        raise OSError(f"files cannot be mapped into memory: {error}") from error
    if read != written:
        raise OSError("a file mapped into memory has other bytes than were written")


def _try_lock(path: Path) -> None:
    try:
        with _lock(path):
            try:
                with _lock(path):
                    is_exclusive = False
            except Timeout:
                is_exclusive = True
    except (NotImplementedError, OSError) as error:
        raise OSError(f"files cannot be locked: {error}") from error
    if not is_exclusive:
        raise OSError("a lock can be taken twice")


def _lock(path: Path) -> FileLock:
    """Return a lock of the kind that stores use: the operating system's, without a fallback."""
    return FileLock(path, timeout=0, fallback_to_soft=False)


def _kind(host: Host, folder: str) -> str:
    """Return the file system of the deepest mount point above the folder, "" if unknown. Later mounts hide earlier."""
    best, kind = -1, ""
    for line in (host.text("/proc/self/mountinfo") or "").splitlines():
        mounted, _, described = line.partition(" - ")
        words = mounted.split()
        if len(words) < 5 or not described:
            continue
        point = words[4].replace("\\040", " ").rstrip("/")
        if (folder == point or folder.startswith(point + "/")) and len(point) >= best:
            best, kind = len(point), described.split()[0]
    return kind
