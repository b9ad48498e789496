"""Conversions in processes of their own, which fork from one that has imported all there is to import.

Nothing but plain imports happens there before the forks, so that no thread can be lost in one.
"""

import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401 - imported before the fork, and not in each process again
import torch

from hetero_ee.weights.store.conversion import WAITING
from hetero_ee.weights.store.filesystem import FileSystem
from tests.store_support import contents, made_store

RENAMED = "renamed"


def fork_server() -> ForkServerContext:
    """Where processes with these imports come from in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store_processes"])
    return context


class SlowDisk:
    """The real disk with a pause of up to `pause_s` after each call, half of each write, and a log of renames."""

    def __init__(self, seed: int, pause_s: float, log: Path) -> None:
        self._random, self._pause_s, self._log = random.Random(seed), pause_s, log

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == "write":
                file, data = arguments
                FileSystem().write(file, data[: len(data) // 2])
                self._pause()
                result = FileSystem().write(file, data[len(data) // 2 :])
            else:
                result = getattr(FileSystem(), name)(*arguments)
            if name == "rename":
                with self._log.open("a") as log:
                    log.write(f"{RENAMED} by {os.getpid()}\n")
            self._pause()
            return result

        return call

    def _pause(self) -> None:
        time.sleep(self._random.random() * self._pause_s)


def convert_slowly(model_folder: Path, target: Path, seed: int, pause_s: float, log: Path, events: Connection) -> None:
    """Sends "began", "waiting" where it has to, and at the end what the store holds."""
    torch.set_num_threads(1)

    def progress(stage: str, n_done: int, n_all: int) -> None:
        if stage == WAITING:
            events.send("waiting")

    events.send("began")
    made_store(model_folder, target, files=SlowDisk(seed, pause_s, log), progress=progress)
    events.send(contents(target))
