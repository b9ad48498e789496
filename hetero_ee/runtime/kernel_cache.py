"""The cache of compiled CPU kernels: a folder that only its owner may write to, whose files are checked."""

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
PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def kernel_cache_folder(cache: Path) -> Path:
    """Return the folder for this state of the kernels' sources, so that an edit never meets older compiled code.

    Its files are also keyed by the compilers' versions, CPU name and features, but not by imported modules.
    """
    spec = find_spec("hetero_ee_cpu_ops")
    assert spec is not None and spec.origin is not None
    digest = hashlib.sha256()
    for file in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return cache / "kernels" / digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder of compiled kernels. It is filled once everything that a first token needs has been compiled."""

    folder: Path
    is_trusted: bool = True  # False: nothing is read or written there, and each process compiles for itself
    is_writable: bool = True  # False: what is there is read

    @property
    def keeps(self) -> bool:
        """Whether code compiled now is kept for the next start."""
        return self.is_trusted and self.is_writable

    def is_filled(self) -> bool:
        """Whether all files that existed when it was filled still exist."""
        try:
            names = (self.folder / FILLED_FILE).read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError):
            return False
        return self.is_trusted and all((self.folder / name).is_file() for name in names)

    def set_filled(self) -> None:
        """Mark the cache as filled.

        Raises:
            DiskFullError: if the disk is full.
            StoreError: if it can't be written otherwise.
        """
        from hetero_ee_cpu_ops.kernel_files import SUFFIX

        if self.keeps:
            names = sorted(file.name for file in self.folder.glob(f"*{SUFFIX}"))
            with store_errors(self.folder):
                (self.folder / FILLED_FILE).write_text("\n".join(names), encoding="ascii")


def use_kernel_cache(cache: Path, progress: Progress | None = None) -> KernelCache:
    """Keep compiled kernels below `cache`. Call this before the first kernel runs.

    Damaged files are removed and compiled again. An untrusted folder is not used, and a read-only one gets no new
    files: each
    process then compiles for itself. `progress` receives a sentence about it.
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
    """Return why compiled code in the folder can't be trusted, or an empty string. A new folder is made private."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(PRIVATE)
        found = folder.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        return "it is another user's"
    if os.name == "posix" and found.st_mode & WRITABLE_BY_OTHERS:
        return "other users may write to it"
    return "" if os.access(folder, os.R_OK | os.X_OK) else "it is not readable"


def _remove_damaged(folder: Path) -> int:
    """Remove damaged files and return their number. Unfinished files of killed processes are removed too, but not
    counted."""
    from hetero_ee_cpu_ops.kernel_files import SUFFIX, is_unfinished, read_kernel

    n_damaged = 0
    for file in folder.iterdir():
        is_damaged = file.suffix == SUFFIX and read_kernel(file) is None
        if is_damaged or is_unfinished(file):
            n_damaged += is_damaged
            with suppress(OSError):
                file.unlink()
    return n_damaged
