"""The cache of compiled CPU kernels: a folder that only its owner may write to, with verified files."""

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.weights.store.filesystem import store_errors

FILLED_FILE = "filled"


def kernel_cache_folder(cache: Path) -> Path:
    """Return the cache folder for the current sources of the kernels, so that edited sources are compiled again.

    Its files also depend on the compilers' versions and on the CPU's name and features, but not on imported modules.
    """
    spec = find_spec("hetero_ee_cpu_ops")
    assert spec is not None and spec.origin is not None
    digest = hashlib.sha256()
    for file in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return cache / "kernels" / digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder of compiled kernels. It is "filled" once it has everything that a first token needs."""

    folder: Path
    is_trusted: bool = True  # False: nothing is read or written there, and each process compiles for itself
    is_writable: bool = True  # False: existing files are read, none are added

    @property
    def keeps(self) -> bool:
        """Whether kernels compiled by this process are saved for the next start."""
        return self.is_trusted and self.is_writable

    def is_filled(self) -> bool:
        """Return whether all files that existed when the cache was filled still exist."""
        from hetero_ee_cpu_ops.jit.kernel_files import read_own

        try:
            names = read_own(self.folder / FILLED_FILE).decode("ascii").split()
            return self.is_trusted and all((self.folder / name).is_file() for name in names)
        except (OSError, UnicodeDecodeError):
            return False

    def set_filled(self) -> None:
        """Mark the cache as filled with the files that it has now.

        Raises:
            DiskFullError: if the disk is full.
            StoreError: if the mark can't be written for another reason.
        """
        from hetero_ee_cpu_ops.jit.kernel_files import PRIVATE, SUFFIX

        if self.keeps:
            names = sorted(file.name for file in self.folder.glob(f"*{SUFFIX}"))
            with store_errors(self.folder):
                (self.folder / FILLED_FILE).write_text("\n".join(names), encoding="ascii")
                (self.folder / FILLED_FILE).chmod(PRIVATE)


def use_kernel_cache(cache: Path, progress: Progress | None = None) -> KernelCache:
    """Make Numba save compiled kernels below `cache`. Call this before the first kernel runs.

    Damaged files are removed and compiled again. If the folder can't be trusted or written to, each process compiles
    the missing kernels for itself. `progress` receives a sentence about such problems.
    """
    import numba

    folder = kernel_cache_folder(cache)
    if str(folder) == numba.config.CACHE_DIR:  # checked by this process
        return KernelCache(folder, is_writable=os.access(folder, os.W_OK))
    problem = _problem(folder)
    numba.config.CACHE_DIR = "" if problem else str(folder)
    remark = progress or (lambda *_: None)
    kernels = KernelCache(folder, is_trusted=not problem, is_writable=os.access(folder, os.W_OK))
    if not kernels.is_filled() and not kernels.is_writable:
        problem = problem or "it is not writable"
    if problem:
        remark(
            f"The CPU kernels are compiled at every start, since {folder} can't keep them ({problem}); set "
            "HETERO_EE_CACHE_DIR to a folder of your own.",
            0,
            0,
        )
    elif n_damaged := _remove_damaged(folder):
        files = "file of the compiled CPU kernels was" if n_damaged == 1 else "files of the compiled CPU kernels were"
        remark(f"{n_damaged} {files} damaged and {'is' if n_damaged == 1 else 'are'} made again.", 0, 0)
    return kernels


def _problem(folder: Path) -> str:
    """Return why compiled code in the folder can't be trusted, or "". A missing folder is made, private to the user."""
    from hetero_ee_cpu_ops.jit.kernel_files import why_foreign

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        found = folder.lstat()
        parent = folder.parent.resolve()  # a link's target may be exchanged as well as the link
        parents = dict.fromkeys([*folder.absolute().parents, parent, *parent.parents])
        replaceable = list(filter(_lets_others_rename, parents))
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if problem := why_foreign(found) or (f"other users may write to {replaceable[0]}" if replaceable else ""):
        return problem
    return "" if os.access(folder, os.R_OK | os.X_OK) else "it is not readable"


def _lets_others_rename(folder: Path) -> bool:
    """Return whether other users may rename entries of the folder. This process's own group is trusted."""
    found = folder.stat()
    if os.name != "posix" or found.st_mode & stat.S_ISVTX:
        return False
    return bool(found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid()))


def _remove_damaged(folder: Path) -> int:
    """Remove damaged files and return their number, without unfinished files of killed processes."""
    from hetero_ee_cpu_ops.jit.kernel_files import SUFFIX, is_unfinished, read_kernel

    n_damaged = 0
    for file in folder.iterdir():
        is_damaged = file.suffix == SUFFIX and read_kernel(file) is None
        if is_damaged or is_unfinished(file):
            n_damaged += is_damaged
            with suppress(OSError):
                file.unlink()
    return n_damaged
