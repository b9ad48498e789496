"""First profiles in several processes: one measures at a time, and what it has found serves the others."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.profile_processes import profile_slowly

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")
PATIENCE_S = 60


@dataclass(frozen=True)
class Profiling:
    """A process, and what it says."""

    process: ForkServerProcess
    events: Connection

    def said(self) -> Any:
        assert self.events.poll(PATIENCE_S)
        return self.events.recv()


@contextmanager
def profiling(folder: Path, cache: Path, family: str = "llama") -> Iterator[Profiling]:
    """A process that asks for this machine's profile; ended at the latest with the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.profile_processes"])
    events, theirs = context.Pipe(duplex=False)
    arguments = (family, folder / "data", cache, folder / "log", theirs)
    process = context.Process(target=profile_slowly, args=arguments)
    process.start()
    theirs.close()
    try:
        yield Profiling(process, events)
    finally:
        process.kill()
        process.join()
        process.close()
        events.close()


def test_the_second_waits_and_finds_what_the_first_has_kept(tmp_path: Path, cache: Path) -> None:
    with profiling(tmp_path, cache) as first:
        assert first.said() == "measuring"
        with profiling(tmp_path, cache) as second:
            assert second.said() == "waiting"
            (tmp_path / "go").touch()
            assert first.said() == second.said()
    assert (tmp_path / "log").read_text().count("begins") == 1


def test_measurements_for_two_models_do_not_overlap(tmp_path: Path, cache: Path) -> None:
    with profiling(tmp_path, cache) as first:
        assert first.said() == "measuring"
        with profiling(tmp_path, cache, "qwen3") as second:
            assert second.said() == "waiting"
            (tmp_path / "go").touch()
            assert second.said() == "measuring"
            assert first.said() != second.said()
    lines = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert lines == ["begins", "ends"] * 2


def test_who_waits_measures_where_the_first_was_killed(tmp_path: Path, cache: Path) -> None:
    with profiling(tmp_path, cache) as first:
        assert first.said() == "measuring"
        with profiling(tmp_path, cache) as second:
            assert second.said() == "waiting"
            first.process.kill()
            (tmp_path / "go").touch()
            assert second.said() == "measuring" and "measured" in second.said()
