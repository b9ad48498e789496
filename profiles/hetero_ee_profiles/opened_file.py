"""Opens files for reading and makes sure that they are regular files."""

import os
import stat
from io import BufferedReader
from pathlib import Path

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(file: Path, *, buffering: int = -1, kinds: tuple[int, ...] = (stat.S_IFREG,)) -> BufferedReader:
    """Open `file` for reading bytes, following links. Never blocks, even if it is a pipe without a writer.

    Raises:
        OSError: if it cannot be opened or is not of one of `kinds`.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_IFMT(mode) not in kinds:
            raise OSError(f"it is {kind_of(mode)}, not a regular file")
        opened = os.fdopen(descriptor, "rb", buffering=buffering)
    except BaseException:
        os.close(descriptor)
        raise
    return opened  # type: ignore[return-value]  # without buffering a raw file, whose reads may be short


def kind_of(mode: int) -> str:
    """Return a phrase for the kind of file with this st_mode, such as "a folder"."""
    return KINDS.get(stat.S_IFMT(mode), "of an unknown kind")
