"""The command line in processes that fork from one that has imported what takes seconds, so that many can be killed.

Nothing but plain imports happens there before the forks, so that no thread can be lost in one.
"""

import itertools
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numba  # noqa: F401 - imported before the fork, and not in each process again
import torch  # noqa: F401
import transformers  # noqa: F401

import hetero_ee.engine  # noqa: F401
from hetero_ee_cli.app import main

OUT, ERR = "out", "err"


Fault = tuple[str | int, int]  # ("size", most bytes of a file), or (errno, number of the call that fails)


def started(folder: Path, arguments: Sequence[object], fault: Fault | None = None) -> ForkServerProcess:
    """`hetero-ee ARGUMENTS` with cache and data in `folder`, where the files out and err get what it says."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.killed_processes"])
    process = context.Process(target=_run, args=(folder, [str(each) for each in arguments], fault))
    process.start()
    return process


def _run(folder: Path, arguments: list[str], fault: Fault | None) -> None:
    os.environ |= {f"HETERO_EE_{name.upper()}_DIR": str(folder / name) for name in ("cache", "data")}
    os.environ.pop("HETERO_EE_PROFILE", None)
    for name, descriptor in ((OUT, 1), (ERR, 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["hetero-ee", *arguments]
    if fault is not None:
        _fail(folder, *fault)
    main()


def _fail(folder: Path, kind: str | int, number: int) -> None:
    """Lets no file grow beyond `number` bytes, or fails call `number` to the disk."""
    if isinstance(kind, str):
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))
        return
    calls = itertools.count(1)

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            is_ours = isinstance(first, int) or str(folder) in os.fsdecode(first)
            if is_ours and next(calls) == number:
                raise OSError(kind, os.strerror(kind))
            return real(first, *arguments, **options)

        return call

    for name in ("open", "fsync", "rename", "replace", "mkdir", "unlink", "posix_fallocate", "ftruncate", "stat"):
        setattr(os, name, failing(getattr(os, name)))
