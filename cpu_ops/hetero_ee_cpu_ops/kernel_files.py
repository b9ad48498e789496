"""Compiled kernels on disk: one file for each function and signature, checked before anything in it is believed.

Numba's own cache keeps a pickled index beside numbered files. Nothing checks what it reads there: a flipped bit runs,
and two processes that compile at once may give one number to two kernels. Here a file is named by a digest of what it
was compiled from and begins with a digest of its name and content, so that there is no index to share or to poison.
"""

import hashlib
import pickle
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit, types
from numba.core.caching import FunctionCache, _Cache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

SUFFIX, UNFINISHED = ".kernel", ".unfinished"
UNFINISHED_S = 600  # no kernel takes that long to write
DIGEST_BYTES = hashlib.sha256().digest_size
COMPILED_WITH = f"python {platform.python_version()}, numba {numba.__version__}, llvmlite {llvmlite.__version__}"


class KernelFiles(_Cache):
    """The files of one function, in the folder numba.config.CACHE_DIR; where that is empty, nothing is kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_func = function  # as Numba's index key expects it

    @property
    def cache_path(self) -> str:
        return str(numba.config.CACHE_DIR)

    def enable(self) -> None:
        """Nothing to do: whether code is kept depends on the folder."""

    disable = flush = enable

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled code, None where there is none that is whole."""
        if not self.cache_path:
            return None
        target_context.refresh()
        payload = read_kernel(self._file(signature, target_context.codegen()))
        if payload is None:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(payload))  # noqa: S301  # written by this user alone

    def save_overload(self, signature: Any, code: Any) -> None:
        """Keeps the code where the disk has room; a kernel that can't be kept is compiled again by the next process."""
        if self.cache_path:
            with suppress(OSError):
                write_kernel(self._file(signature, code.codegen), dumps(code._reduce()))

    def _file(self, signature: Any, codegen: Any) -> Path:
        key = FunctionCache._index_key(self, signature, codegen)  # signature, CPU and its features, bytecode, closure
        identity = hashlib.sha256(repr((COMPILED_WITH, self._py_func.__module__, key)).encode()).hexdigest()
        return Path(self.cache_path) / f"{self._py_func.__name__}-{identity[:32]}{SUFFIX}"


def compiled(function: Callable[..., Any] | None = None, *, signature: Any = None, nogil: bool = False) -> Any:
    """Decorator: compiled at the first call with each signature, or now for the one given and no other; and kept.

    nogil: releases the interpreter's lock.
    """
    if function is None:
        return lambda decorated: compiled(decorated, signature=signature, nogil=nogil)
    dispatcher = njit(nogil=nogil)(function)
    dispatcher._cache = KernelFiles(function)
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher


class Inner(CPUDispatcher):
    """A function that has nothing for Python to call it by."""

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} is called by compiled functions alone.")


def inner(function: Callable[..., Any]) -> Any:
    """Decorator: compiled for compiled functions alone, and kept. A quarter less to compile, and the same code."""
    dispatcher = Inner(function, targetoptions={"nopython": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True})
    dispatcher._cache = KernelFiles(function)
    return dispatcher


def compiled_chunk(function: Callable[[int, int], None]) -> Any:
    """The function as C code with an address, void(intp, intp), compiled now and kept. Numba's `cfunc`."""
    callback: Any = CFunc(function, normalize_signature(types.void(types.intp, types.intp)), locals={}, options={})
    callback._cache = KernelFiles(function)
    callback.compile()
    return callback


def read_kernel(file: Path) -> bytes | None:
    """What was written there; None for a file that is missing, damaged or another's."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    payload = content[DIGEST_BYTES:]
    return payload if content[:DIGEST_BYTES] == _digest(file, payload) else None


def write_kernel(file: Path, payload: bytes) -> None:
    """Whole or not at all, whichever processes write at once. What a power cut leaves half written is seen when read.

    Raises OSError.
    """
    unfinished = file.with_name(f"{file.stem}-{uuid.uuid4().hex[:16]}{UNFINISHED}")
    try:
        unfinished.write_bytes(_digest(file, payload) + payload)
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def is_unfinished(file: Path) -> bool:
    """Whether a process that is gone began to write it: what is younger may still be written."""
    try:
        return file.suffix == UNFINISHED and time.time() - file.stat().st_mtime > UNFINISHED_S
    except OSError:  # finished in the meantime
        return False


def _digest(file: Path, payload: bytes) -> bytes:
    return hashlib.sha256(file.name.encode() + payload).digest()
