"""Compiled kernels on disk: one file per function and signature, verified before it is unpickled.

Numba's own cache keeps a pickled index next to numbered files and verifies nothing: a flipped bit runs, and two
processes that compile at the same time may give one number to two kernels. Here a file is named by a digest of what it
was compiled from and begins with a digest of its name and content, so no index can be shared or corrupted.
"""

import hashlib
import os
import pickle
import platform
import signal
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit, types
from numba.core.caching import FunctionCache, _Cache
from numba.core.ccallback import CFunc, _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult, Flags, compile_extra
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

SUFFIX, UNFINISHED = ".kernel", ".unfinished"
UNFINISHED_S = 600  # writing a kernel never needs that long
DIGEST_BYTES = hashlib.sha256().digest_size
PRIVATE = 0o600
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
OPENING = sum(getattr(os, flag, 0) for flag in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
COMPILED_WITH = f"python {platform.python_version()}, numba {numba.__version__}, llvmlite {llvmlite.__version__}"


class KernelFiles(_Cache):
    """The cache files of one function in the folder numba.config.CACHE_DIR. If that is empty, nothing is cached."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_func = function  # as Numba's index key expects it

    @property
    def cache_path(self) -> str:
        return str(numba.config.CACHE_DIR)

    def enable(self) -> None:
        """Do nothing: caching depends only on whether a folder is set."""

    disable = flush = enable

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the cached code for this signature, None if no intact file exists."""
        if not self.cache_path:
            return None
        payload = read_kernel(self._file(signature, target_context.codegen()))
        if payload is None:
            return None
        # Numba would import everything it can compile, even SciPy's BLAS. Cached code needs only the memory manager.
        rtsys.initialize(target_context)
        return CompileResult._rebuild(target_context, *pickle.loads(payload))  # noqa: S301  # digest checked above

    def save_overload(self, signature: Any, code: Any) -> None:
        """Cache compiled code. If the disk cannot hold it, the next process compiles again."""
        if self.cache_path:
            with suppress(OSError):
                write_kernel(self._file(signature, code.codegen), dumps(code._reduce()))

    def _file(self, signature: Any, codegen: Any) -> Path:
        key = FunctionCache._index_key(self, signature, codegen)  # signature, CPU and its features, bytecode, closure
        identity = hashlib.sha256(repr((COMPILED_WITH, self._py_func.__module__, key)).encode()).hexdigest()
        return Path(self.cache_path) / f"{self._py_func.__name__}-{identity[:32]}{SUFFIX}"


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM, and let their handlers run at the end of the block.

    Python would run them in a callback from LLVM, which loses their exceptions, and the code that it was called for.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread() or None in handlers.values():
        yield
        return
    held: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: held.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def compiled(function: Callable[..., Any] | None = None, *, signature: Any = None, nogil: bool = False) -> Any:
    """Decorate a function that Numba compiles and caches: at the first call, or now if `signature` is given.

    Arguments of the decorator are optional. `nogil` releases the GIL during calls.
    """
    if function is None:
        return lambda decorated: compiled(decorated, signature=signature, nogil=nogil)
    dispatcher = njit(nogil=nogil)(function)
    dispatcher._cache = KernelFiles(function)
    dispatcher.compile = _signals_held()(dispatcher.compile)
    if signature is not None:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher


class _LinkedLibrary(JITCodeLibrary):
    """Unoptimized code that is linked into kernels. LLVM optimizes and translates only whole kernels.

    Numba would do so for every function with all that it calls: attention took 13 s instead of 6.3 s to compile (AMD
    EPYC, 2 cores, 2026-11-28).
    """

    def _optimize_final_module(self) -> None:
        """Leave the code as it is."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _InnerCompiler(_FunctionCompiler):
    def _compile_core(self, args: Any, return_type: Any) -> CompileResult:
        context, flags = self.targetdescr.target_context, Flags()
        self.targetdescr.options.parse_as_flags(flags, self.targetoptions)
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        library = _LinkedLibrary(context.codegen(), self.py_func.__qualname__)
        code = compile_extra(
            self.targetdescr.typing_context, context, self.py_func, args, return_type, flags, {}, library
        )._replace(entry_point=object())  # the key by which callers find it
        context.insert_user_function(code.entry_point, code.fndesc, [library])
        return code


class Inner(CPUDispatcher):
    """A compiled function that Python code cannot call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, targetoptions={"nopython": True})
        self._compiler = _InnerCompiler(function, self.targetdescr, self.targetoptions, {}, Compiler)

    def add_overload(self, cres: CompileResult) -> None:
        self.overloads[tuple(cres.signature.args)] = cres

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Compile one version for all values of constant arguments."""
        return super().get_call_template([types.unliteral(each) for each in args], kws)

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} can only be called by compiled functions.")


def inner(function: Callable[..., Any]) -> Any:
    """Decorate a function that only compiled functions call. The cache has its code only as a part of theirs."""
    return Inner(function)


def compiled_chunk(function: Callable[[int, int], None]) -> Any:
    """Compile `function` now to a C function void(intp, intp) with an address (Numba's `cfunc`), and cache it."""
    callback: Any = CFunc(function, normalize_signature(types.void(types.intp, types.intp)), locals={}, options={})
    callback._cache = KernelFiles(function)
    _signals_held()(callback.compile)()
    return callback


def why_foreign(found: os.stat_result) -> str:
    """Return why other users may have written a file or folder, or "" if they can't have."""
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        return "it is another user's"
    return "other users may write to it" if os.name == "posix" and found.st_mode & WRITABLE_BY_OTHERS else ""


def read_own(file: Path) -> bytes:
    """Return the content of a regular file that only this user can have written.

    The opened file itself is checked, in case its folder was replaced meanwhile.

    Raises:
        OSError: if it is another kind of file, such as a link or a pipe, or foreign.
    """
    with open(os.open(file, OPENING), "rb") as opened:  # noqa: PTH123 - by its descriptor
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or why_foreign(found):
            raise OSError(f"{file} is not a regular file of this user's")
        return opened.read()


def read_kernel(file: Path) -> bytes | None:
    """Return the code in a file of write_kernel; None if it is missing, damaged or for another kernel."""
    try:
        content = read_own(file)
    except OSError:
        return None
    payload = content[DIGEST_BYTES:]
    return payload if content[:DIGEST_BYTES] == _digest(file, payload) else None


def write_kernel(file: Path, payload: bytes) -> None:
    """Write a kernel file atomically, also against concurrent writers. read_kernel detects damage by a power cut.

    Raises:
        OSError: if the file cannot be written.
    """
    unfinished = file.with_name(f"{file.stem}-{uuid.uuid4().hex[:16]}{UNFINISHED}")
    try:
        unfinished.write_bytes(_digest(file, payload) + payload)
        unfinished.chmod(PRIVATE)  # whatever the umask: files of a group are not read again
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def is_unfinished(file: Path) -> bool:
    """Return whether a dead process left the file unfinished. A recent file may still be being written."""
    try:
        return file.suffix == UNFINISHED and time.time() - file.stat().st_mtime > UNFINISHED_S
    except OSError:  # finished in the meantime
        return False


def _digest(file: Path, payload: bytes) -> bytes:
    return hashlib.sha256(file.name.encode() + payload).digest()
