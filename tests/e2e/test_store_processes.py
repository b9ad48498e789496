"""Several processes and kills: one conversion at a time, gone on with after any kill, and the same bytes for all."""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.store.filesystem import FileSystem, store_lock
from hetero_ee.weights.store.reader import open_store
from tests.store_processes import RENAMED, convert_slowly, fork_server
from tests.store_support import contents, made_store

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")
PATIENCE_S = 60


@dataclass(frozen=True)
class Converting:
    """A process, and what it says."""

    process: ForkServerProcess
    events: Connection

    def said(self) -> Any:
        assert self.events.poll(PATIENCE_S)
        return self.events.recv()


@contextmanager
def converting(model_folder: Path, target: Path, seed: int = 0, pause_s: float = 0.004) -> Iterator[Converting]:
    """A process that has begun to convert; ended at the latest with the block."""
    context = fork_server()
    events, theirs = context.Pipe(duplex=False)
    arguments = (model_folder, target, seed, pause_s, target.with_name("log"), theirs)
    process = context.Process(target=convert_slowly, args=arguments)
    process.start()
    theirs.close()
    started = Converting(process, events)
    try:
        assert started.said() == "began"
        yield started
    finally:
        process.kill()
        process.join()
        process.close()
        events.close()


@pytest.mark.parametrize("n_kills", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_kills_at_any_moment(model_folder: Path, tmp_path: Path, whole: dict[str, bytes], n_kills: int) -> None:
    """Each conversion goes on from what the kills before have left, until one is done; its store is the same."""
    choose = random.Random(0)
    target = tmp_path / "store"
    n_early = 0
    for number in range(n_kills):
        with converting(model_folder, target, seed=number) as started:
            started.events.poll(choose.random() * 0.4)
            started.process.kill()
            started.process.join()
            n_early += started.process.exitcode == -signal.SIGKILL
        if target.exists():
            assert contents(target) == whole
            shutil.rmtree(target)
        elif choose.random() < 0.2:
            assert contents(made_store(model_folder, target)) == whole
            shutil.rmtree(target)
    assert n_early > n_kills / 3
    assert contents(made_store(model_folder, target)) == whole
    assert {path.name for path in tmp_path.iterdir()} <= {"store", "log"}


@pytest.mark.parametrize("n_rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_processes_at_once_make_one_store(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], n_rounds: int
) -> None:
    for number in range(n_rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        contexts = [converting(model_folder, folder / "store", seed) for seed in range(2 + number % 7)]
        with ThreadPoolExecutor(len(contexts)) as pool:
            started = list(pool.map(lambda context: context.__enter__(), contexts))
        try:
            said = [[*iter(one.said, whole)] for one in started]  # what each says before it has the whole store
        finally:
            for context in contexts:
                context.__exit__(None, None, None)
        assert {event for events in said for event in events} <= {"waiting"}
        assert (folder / "log").read_text().count(RENAMED) == 1
        assert {path.name for path in folder.iterdir()} == {"store", "log"}


def test_who_waits_goes_on_with_what_a_killed_process_has_left(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    target = tmp_path / "store"
    with converting(model_folder, target, pause_s=0.3) as first:
        while not (tmp_path / "store.partial").is_dir():
            assert first.process.is_alive()
        with converting(model_folder, target) as second:
            assert second.said() == "waiting"
            first.process.kill()
            assert second.said() == whole
    assert contents(target) == whole


def test_threads_of_one_process_take_turns(model_folder: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: made_store(model_folder, tmp_path / "store"), range(3)))
    assert len(set(made)) == 1 and contents(made[0]) == whole
    assert open_store(made[0], read_spec(made[0])).n_weights > 0


def test_a_lock_that_is_removed_while_others_wait_keeps_them_apart(tmp_path: Path) -> None:
    """Each holder removes the file, so that those who wait have opened one that is no longer there."""
    target, held, n_together = tmp_path / "store", threading.Lock(), []

    def hold(_: int) -> None:
        for _ in range(8):
            with store_lock(target, FileSystem(), lambda: None):
                n_together.append(held.acquire(blocking=False))
                time.sleep(0.002)
                held.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, range(4)))
    assert len(n_together) == 32 and all(n_together) and not list(tmp_path.iterdir())
