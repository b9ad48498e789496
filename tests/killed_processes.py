"""The command line in processes that fork from one that has imported what takes seconds, so that many can be killed.

Nothing but plain imports happens there before the forks, so that no thread can be lost in one.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import numba  # noqa: F401 - imported before the fork, and not in each process again
import torch  # noqa: F401
import transformers  # noqa: F401

import hetero_ee.engine  # noqa: F401
from hetero_ee_cli.app import main

OUT, ERR = "out", "err"


def started(folder: Path, arguments: Sequence[object]) -> ForkServerProcess:
    """`hetero-ee ARGUMENTS` with cache and data in `folder`, where the files out and err get what it says."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.killed_processes"])
    process = context.Process(target=_run, args=(folder, [str(each) for each in arguments]))
    process.start()
    return process


def _run(folder: Path, arguments: list[str]) -> None:
    os.environ |= {f"HETERO_EE_{name.upper()}_DIR": str(folder / name) for name in ("cache", "data")}
    os.environ.pop("HETERO_EE_PROFILE", None)
    for name, descriptor in ((OUT, 1), (ERR, 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["hetero-ee", *arguments]
    main()
