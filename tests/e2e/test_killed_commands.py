"""SIGKILL and failing disks at any moment of commands that write: what was whole stays so, and the next run works."""

import errno
import itertools
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.store.calibration_files import RECORD_FILE
from hetero_ee.weights.store.record import load_record
from hetero_ee.weights.store.verification import verify
from tests.e2e.test_calibration import text_of
from tests.e2e.test_killed_runs import check_files, ended, with_kernels
from tests.killed_processes import ERR, started

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")]
KILLS_EACH = 5  # before a run that nobody kills
MOST_RUNS = 20  # for each that is killed: others end before
LONGEST_S = {"convert": 2.0, "calibrate": 8.0, "profile": 10.0, "serve": 4.0}


def words_of(command: str, tiny: Path, text: Path) -> tuple[object, ...]:
    more: dict[str, tuple[object, ...]] = {
        "convert": (tiny,),
        "calibrate": (tiny, "--text", text, "--tokens", 600, "-t", 1),
        "profile": ("--quick", "--refresh", "--json"),
        "serve": (tiny, "--port", 0, "-t", 1),
    }
    return (command, *more[command])


def check_whole(folder: Path, tiny: Path) -> None:
    """Every store and record that has its name is whole, and every kernel, profile and lock is in order."""
    for store in (folder / "cache" / "stores").glob("*/manifest.json"):
        if store.parent.suffix != ".partial":
            assert verify(store.parent) == () and read_spec(store.parent) == read_spec(tiny)
    for record in (folder / "cache" / "stores").glob(f"*.calibration/{RECORD_FILE}"):
        assert load_record(record, 2**26, "the calibration") is not None
    if not [*(folder / "cache").rglob("*.partial"), *(folder / "cache").rglob("*.calibration*")]:
        check_files(folder)


def goes_on(folder: Path, words: tuple[object, ...]) -> bool:
    """Whether a run that nobody kills does what it is for."""
    if words[0] != "serve":
        return ended(folder, words).code == 0
    (folder / ERR).write_text("")  # of the run before
    process = started(folder, words)
    try:
        for _ in range(600):
            process.join(0.1)
            found = re.search(r"served at (http://\S+);", (folder / ERR).read_text())
            if found:
                body = {"prompt": "Tom", "max_tokens": 4}
                return httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60).status_code == 200
            if process.exitcode is not None:
                break
        return False
    finally:
        process.kill()
        process.join()


def counted(check: Callable[[], object]) -> int:
    """1 if the check fails."""
    try:
        check()
    except Exception as error:
        print(repr(error)[:500])
        return 1
    return 0


@pytest.mark.parametrize("command", LONGEST_S)
@pytest.mark.parametrize("n_kills", [pytest.param(5, marks=pytest.mark.full), pytest.param(50, marks=pytest.mark.slow)])
def test_a_command_killed_at_any_moment(kernels: Path, tiny: Path, tmp_path: Path, command: str, n_kills: int) -> None:
    folder, chance = with_kernels(tmp_path / "home", kernels), random.Random(command)
    text = tmp_path / "words.txt"
    text.write_text(text_of(700))
    words = words_of(command, tiny, text)
    n_killed = n_damaged = n_stuck = 0
    numbers = itertools.count()
    for _ in range(MOST_RUNS * n_kills):
        process = started(folder, words)
        process.join(chance.random() * LONGEST_S[command])
        process.kill()
        process.join()
        was_killed = process.exitcode == -signal.SIGKILL
        n_killed += was_killed
        n_damaged += counted(lambda: check_whole(folder, tiny))
        if was_killed and n_killed % KILLS_EACH == 0:
            n_stuck += not goes_on(folder, words)
            n_damaged += counted(lambda: check_whole(folder, tiny))
        if n_killed == n_kills:
            break
        if not was_killed or n_killed % KILLS_EACH == 0:
            for store in (folder / "cache" / "stores").glob("*"):
                if command in ("convert", "serve") and chance.random() < 0.7 and store.is_dir():
                    store.rename(tmp_path / f"{store.name}-{next(numbers)}")  # so that there is something to do again
    print(f"{command}: {n_killed} killed, {n_damaged} left a damaged file, {n_stuck} could not continue")
    assert n_killed and (n_damaged, n_stuck) == (0, 0)


@pytest.mark.parametrize("command", LONGEST_S)
@pytest.mark.parametrize("n_faults", [pytest.param(50, marks=pytest.mark.slow)])
def test_a_command_on_a_failing_disk(kernels: Path, tiny: Path, tmp_path: Path, command: str, n_faults: int) -> None:
    """Files that can't grow beyond some size, or a call that fails; a server may go on without."""
    text = tmp_path / "words.txt"
    text.write_text(text_of(700))
    words, chance, n_wrong = words_of(command, tiny, text), random.Random(f"disk {command}"), 0
    for number in range(n_faults):
        folder = with_kernels(tmp_path / str(number), kernels)
        code = chance.choice([errno.ENOSPC, errno.EIO])
        fault = ("size", int(2 ** (chance.random() * 16))) if number % 2 else (code, chance.randrange(1, 40))
        process = started(folder, words, fault)
        process.join(60 if command != "serve" else LONGEST_S[command])
        process.kill()
        process.join()
        said = (folder / ERR).read_text()
        problems = [word for word in ("Traceback", "Exception") if word in said]
        problems += ["is damaged"] * counted(lambda folder=folder: check_whole(folder, tiny))
        problems += ["can't go on"] * (not goes_on(folder, words))
        if problems or process.exitcode not in (0, 1, 2, 3, 4, 5, 6, 28, -signal.SIGKILL):
            print(f"{command}, {fault}: {problems}, code {process.exitcode}: {said[-800:]}")
            n_wrong += 1
        shutil.rmtree(folder)
    print(f"{command}: {n_faults} faults of the disk, {n_wrong} ended wrongly")
    assert n_wrong == 0
