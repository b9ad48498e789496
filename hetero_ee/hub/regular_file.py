"""Find and read files of a model folder safely: only regular files that belong to it, checked again once open."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hetero_ee.errors import HeteroError, ModelError, shown
from hetero_ee_profiles.opened_file import kind_of, open_regular


def find_file(folder: Path, name: str, error: type[HeteroError] = ModelError) -> Path | None:
    """Return the path of a file in `folder`, or None if it does not exist.

    A link must lead into `folder` or to the blobs of the Hugging Face cache that contains `folder`.

    Raises:
        error: for other links and anything but a regular file; opening a pipe would block forever.
    """
    file = folder / name
    try:
        mode = file.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as reason:  # ValueError: a name no file can have
        raise error(f"{folder} can't be searched for {shown(name)} ({reason_of(reason)}).") from reason
    if stat.S_ISLNK(mode):
        mode = _mode_of_target(file, folder, error)
    if not stat.S_ISREG(mode):
        raise error(f"{file} is {kind_of(mode)}, expected a regular file.")
    return file


def read_file(file: Path, max_bytes: int, what: str, error: type[HeteroError] = ModelError) -> bytes:
    """Read a file that find_file has checked. Raises `error`, which names it by `what`, if it exceeds max_bytes."""
    try:
        with open_regular(file) as opened:
            n_bytes = os.fstat(opened.fileno()).st_size
            content = opened.read(max_bytes + 1) if n_bytes <= max_bytes else b""
    except OSError as reason:
        raise error(f"{file} can't be read ({reason_of(reason)}).") from reason
    if max(n_bytes, len(content)) > max_bytes:
        raise error(f"{file} has {n_bytes} bytes; {what} has at most {max_bytes}.")
    return content


def refuse_special(file: Path, error: type[HeteroError] = ModelError) -> None:
    """Raise `error` for a pipe, a socket or a device, or a link to one. Other files, even missing ones, pass."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise error(f"{file} is {kind_of(mode)}, expected a regular file.")


def reason_of(error: Exception) -> str:
    """Return the operating system's message without the path, which the surrounding sentence names already."""
    return getattr(error, "strerror", None) or str(error)


def _mode_of_target(link: Path, folder: Path, error: type[HeteroError]) -> int:
    try:
        target = link.resolve(strict=True)
        if any(target.is_relative_to(root) for root in _roots(folder)):
            return target.stat().st_mode
    except (OSError, RuntimeError) as reason:  # RuntimeError: a loop of links
        raise error(f"{link} is a link that leads nowhere ({reason_of(reason)}).") from reason
    raise error(f"{link} is a link out of its folder, to {shown(str(target))}; put a copy of that file in its place.")


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the folders that files may be in: the model's, and in the cache of huggingface_hub those of its blobs."""
    home = folder.resolve()
    yield home
    for snapshot in (home, *home.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            yield from (repository / "blobs", repository.parent / "blobs")
