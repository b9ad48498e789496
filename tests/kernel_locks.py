"""What one process of a test run compiles, the others wait for: kernels take up to half a minute of LLVM each."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock
import pytest

PATIENCE_S = 120  # then a second process compiles it too


def compile_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes processes that miss a kernel take turns. folder: of the locks."""
    from hetero_ee_cpu_ops.jit.kernel_files import KernelFiles

    load, save = KernelFiles.load_overload, KernelFiles.save_overload
    held: dict[str, filelock.FileLock] = {}

    def load_overload(self: KernelFiles, signature: Any, target: Any) -> Any:
        code = load(self, signature, target)
        if code is not None or not self.cache_path:
            return code
        name = self._file(signature, target.codegen()).name
        lock = held.pop(name, None) or filelock.FileLock(folder / name)
        with suppress(filelock.Timeout):
            lock.acquire(timeout=PATIENCE_S)
        code = load(self, signature, target)
        if code is None:
            held[name] = lock  # it is compiled now, and saved
        else:
            lock.release()
        return code

    def save_overload(self: KernelFiles, signature: Any, code: Any) -> None:
        save(self, signature, code)
        if self.cache_path and (lock := held.pop(self._file(signature, code.codegen).name, None)):
            lock.release()

    patch.setattr(KernelFiles, "load_overload", load_overload)
    patch.setattr(KernelFiles, "save_overload", save_overload)
