"""Detect that files mapped into memory have been written to, which would change the weights."""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hetero_ee.errors import HeteroError

LOWEST_PRIORITY = 19


class FileWatch:
    """Detects writes to files that happen after its creation.

    Args:
        check: called with a file that was written to; raises HeteroError if its content differs from what was mapped.
    """

    def __init__(self, files: Iterable[Path], check: Callable[[Path], None]) -> None:
        self._seen = {file: _inode_and_times(file) for file in files}
        self._check = check
        self.damage: HeteroError | None = None  # found by look()

    def check_later(self, check: Callable[[], None]) -> None:
        """Run `check` in a thread of the lowest priority. The next `look` raises the HeteroError that it ends with."""

        def run() -> None:
            if sys.platform == "linux":  # elsewhere such a number would be that of another process
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
            try:
                check()
            except HeteroError as error:
                self.damage = error

        threading.Thread(target=run, name="checksums", daemon=True).start()

    def look(self) -> None:
        """Call `check` for every file that was written to. Repeat the HeteroError of an earlier failed check.

        Costs microseconds per file. A deleted or replaced file counts as unchanged: the mapping keeps the original.
        """
        if self.damage is not None:
            raise self.damage
        for file, then in self._seen.items():
            now = _inode_and_times(file)
            if then != now and then[:2] == now[:2]:
                try:
                    self._check(file)
                except HeteroError as error:
                    self.damage = error
                    raise
                self._seen[file] = now


def _inode_and_times(file: Path) -> tuple[int, ...]:
    try:
        status = os.stat(file)  # noqa: PTH116 - half the time of Path.stat
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
