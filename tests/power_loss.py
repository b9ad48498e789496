"""What a disk may hold after a power failure: everything that was made durable, and any part of the rest.

A recording disk does its work on a real folder and keeps a log of it. Replayed up to any call, the log gives the files
as the system saw them, and beside them what is durable. A crash keeps of each file that was not flushed a random part
of its newest writes, torn ones too, and of each folder that was not flushed a random part of its newest names.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hetero_ee.weights.store.filesystem import FileSystem

PAGE_BYTES = 512  # what a disk writes whole
Call = tuple[Any, ...]


class RecordingDisk(FileSystem):
    """The real disk, with a log of all that changes it. `forgets` are names of calls that do nothing, unnoticed."""

    def __init__(self, root: Path, forgets: Callable[[str, Path], bool] = lambda name, path: False) -> None:
        self.root, self.forgets = root, forgets
        self.log: list[Call] = []
        self._paths: dict[int, Path] = {}

    def create_folder(self, folder: Path) -> None:
        super().create_folder(folder)
        self._record("create_folder", folder)

    def create_file(self, file: Path) -> BinaryIO:
        opened = super().create_file(file)
        self._paths[id(opened)] = file
        self._record("create_file", file)
        return opened

    def reopen_file(self, file: Path) -> BinaryIO:
        opened = super().reopen_file(file)
        self._paths[id(opened)] = file
        return opened

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        offset = file.tell()
        super().write(file, data)
        self._record("write", self._paths[id(file)], offset, bytes(data))

    def truncate(self, file: BinaryIO, n_bytes: int) -> None:
        super().truncate(file, n_bytes)
        self._record("truncate", self._paths[id(file)], n_bytes)

    def allocate(self, file: BinaryIO, n_bytes: int) -> None:
        super().allocate(file, n_bytes)
        self._record("allocate", self._paths[id(file)], n_bytes)

    def close_durably(self, file: BinaryIO) -> None:
        path = self._paths[id(file)]
        super().close_durably(file)
        self._record("sync_file", path)

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._record("sync_folder", folder)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._record("rename", source, target)

    def remove_file(self, file: Path) -> None:
        super().remove_file(file)
        self._record("remove", file)

    def remove_tree(self, folder: Path) -> None:
        inside = sorted(folder.iterdir())
        super().remove_tree(folder)
        for path in (*inside, folder):
            self._record("remove", path)

    def _record(self, name: str, path: Path, *rest: Any) -> None:
        if not self.forgets(name, path):
            self.log.append((name, path.relative_to(self.root), *rest))


@dataclass(eq=False)
class File:
    """durable: what is certain to survive. newest: changes since, each (kind, offset or size, data)."""

    durable: bytes = b""
    newest: list[Call] = field(default_factory=list)

    def surviving(self, choose: random.Random | None) -> bytes:
        """With any of the newest changes: all of them, or those that `choose` draws."""
        data = bytearray(self.durable)
        for kind, place, piece in self.newest:
            if kind == "size":
                if choose is None or choose.random() < 0.7:
                    data[place:] = bytes(max(0, place - len(data)))
                continue
            for start in range(0, max(len(piece), 1), PAGE_BYTES):
                part = piece[start : start + PAGE_BYTES]
                if choose is None or choose.random() < 0.7:
                    data.extend(bytes(max(0, place + start - len(data))))
                    torn = len(part) if choose is None or choose.random() < 0.9 else choose.randrange(len(part) + 1)
                    data[place + start : place + start + torn] = part[:torn]
                elif choose.random() < 0.5:  # its size survives, its content does not
                    data.extend(bytes(max(0, place + start + len(part) - len(data))))
        return bytes(data)


@dataclass(eq=False)
class Folder:
    """names: durable entries. newest: changes since, each the names to drop and the entries to add."""

    names: dict[str, "File | Folder"] = field(default_factory=dict)
    newest: list[tuple[str | None, str | None, "File | Folder | None"]] = field(default_factory=list)

    def surviving(self, choose: random.Random | None) -> dict[str, "File | Folder"]:
        names = dict(self.names)
        for dropped, added, what in self.newest:
            if choose is None or choose.random() < 0.6:
                if dropped is not None:
                    names.pop(dropped, None)
                if added is not None and what is not None:
                    names[added] = what
        return names

    def seen(self) -> dict[str, "File | Folder"]:
        """As the running system sees it."""
        return self.surviving(None)


class Disk:
    """The durable and the newest state of a tree of files."""

    def __init__(self, durable: Path) -> None:
        self.root = _read(durable)

    def replay(self, call: Call) -> None:
        """One call of a log."""
        name, path, *rest = call
        above = self._at(path.parent)
        assert isinstance(above, Folder)
        if name in ("create_folder", "create_file"):
            above.newest.append((None, path.name, Folder() if name == "create_folder" else File()))
        elif name == "remove":
            above.newest.append((path.name, None, None))
        elif name == "rename":
            above.newest.append((path.name, rest[0].name, self._at(path)))
        else:
            self._change(self._at(path), name, rest)

    def survivor(self, folder: Path, choose: random.Random | None) -> None:
        """Writes to `folder` what a crash now leaves: all, or what `choose` draws."""
        _write(self.root, folder, choose)

    def _change(self, what: "File | Folder", name: str, rest: list[Any]) -> None:
        if isinstance(what, Folder):
            assert name == "sync_folder"
            what.names, what.newest = what.seen(), []
        elif name == "sync_file":
            what.durable, what.newest = what.surviving(None), []
        elif name == "write":
            what.newest.append(("data", *rest))
        else:
            size = len(what.surviving(None)) if name == "allocate" else 0
            what.newest.append(("size", max(rest[0], size), b""))

    def _at(self, path: Path) -> "File | Folder":
        here: File | Folder = self.root
        for part in path.parts:
            assert isinstance(here, Folder)
            here = here.seen()[part]
        return here


def _read(folder: Path) -> Folder:
    names: dict[str, File | Folder] = {}
    for path in folder.iterdir():
        names[path.name] = _read(path) if path.is_dir() else File(path.read_bytes())
    return Folder(names)


def _write(what: Folder, folder: Path, choose: random.Random | None) -> None:
    folder.mkdir()
    for name, inner in what.surviving(choose).items():
        if isinstance(inner, Folder):
            _write(inner, folder / name, choose)
        else:
            (folder / name).write_bytes(inner.surviving(choose))
