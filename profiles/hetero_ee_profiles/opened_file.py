"""A file opened for reading: a regular one, whatever took its place since it was looked at."""

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
    """The file, open for reading bytes; links are followed. Never waits, as opening a pipe that nobody writes to does.

    Raises OSError, also for what is of none of the kinds.
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
    return opened  # type: ignore[return-value]  # unbuffered it is a raw file, whose reads may stop early


def kind_of(mode: int) -> str:
    """What a file of that mode is, in words."""
    return KINDS.get(stat.S_IFMT(mode), "of an unknown kind")
