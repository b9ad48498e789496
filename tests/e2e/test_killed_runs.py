"""SIGKILL at any moment of a first `generate` and of `profile`: what the next run finds is whole, or not there."""

import json
import os
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from hetero_ee_cpu_ops.jit.kernel_files import SUFFIX, UNFINISHED, read_kernel
from hetero_ee_profiles.hardware import HardwareProfile
from hetero_ee_profiles.records import from_json, read_record
from tests.command_line import PROMPT, Ended
from tests.killed_processes import ERR, OUT, started

pytestmark = [pytest.mark.long, pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL")]
PATIENCE_S = 400
WHOLE_S = 30  # about what a first generate takes beside other tests: half a minute of compiling, mostly
MOST_RUNS = 10  # for each that is killed: others end before
# Of runs of which each goes on from what the one before has left; behind them a run that may end.
SEEDS_AND_KILLS = [(3, 2), *(pytest.param(seed, 5, marks=pytest.mark.slow) for seed in range(20))]
GENERATE = ("generate", PROMPT, "-n", 12, "--temp", 0, "-t", 1)
PROFILE = ("profile", "--quick", "--json")


def ended(folder: Path, arguments: Sequence[object]) -> Ended:
    """How a run ends that nobody kills."""
    process = started(folder, arguments)
    process.join(PATIENCE_S)
    code = process.exitcode
    process.kill()
    assert code is not None, (folder / ERR).read_text()
    return Ended(code, (folder / OUT).read_text(), (folder / ERR).read_text())


def kill_runs(folder: Path, arguments: Sequence[object], n_kills: int, longest_s: float, chance: random.Random) -> None:
    """Kill runs at random moments until so many were still running. A run that ends by itself has to end well."""
    n_killed = 0
    for _ in range(MOST_RUNS * n_kills):
        process = started(folder, arguments)
        process.join(chance.random() * longest_s)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), (folder / ERR).read_text()
        n_killed += process.exitcode == -signal.SIGKILL
        if n_killed == n_kills:
            break
    assert n_killed


def check_files(folder: Path) -> None:
    """Nothing unfinished, nothing damaged, no lock held."""
    stores = [path for path in (folder / "cache" / "stores").glob("*") if path.suffix != ".lock"]
    assert all((store / "manifest.json").is_file() for store in stores) and len(stores) <= 1, stores
    for kernel in (folder / "cache").rglob(f"*{SUFFIX}"):
        assert read_kernel(kernel) is not None
    for pattern in ("*.json", "*.disturbed"):
        for profile in (folder / "data" / "profiles").glob(pattern):
            read_record(HardwareProfile, profile)
    for lock in folder.rglob("*.lock"):
        with FileLock(lock, timeout=0, fallback_to_soft=False):
            pass


def with_kernels(folder: Path, kernels: Path) -> Path:
    """The folder, with a copy of what this run of the tests has compiled already."""
    shutil.copytree(kernels, folder / "cache" / "kernels", ignore=shutil.ignore_patterns(f"*{UNFINISHED}"))
    return folder


@pytest.fixture(scope="module")
def said(kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What an undisturbed first generate says."""
    ran = ended(with_kernels(tmp_path_factory.mktemp("first"), kernels), GENERATE)
    assert ran.code == 0, ran.err
    return ran.out


@pytest.mark.parametrize(("seed", "n_kills"), SEEDS_AND_KILLS)
@pytest.mark.sample(0)
def test_a_first_generate_killed_at_any_moment(said: str, tmp_path: Path, seed: int, n_kills: int) -> None:
    """Conversion, measurement, plan and compilation, wherever the kills before have left them."""
    chance = random.Random(seed)
    kill_runs(tmp_path, GENERATE, n_kills, WHOLE_S, chance)
    for _ in range(2):
        ran = ended(tmp_path, GENERATE)
        assert (ran.code, ran.out) == (0, said), ran.err
        assert not any(word in ran.err for word in ("Traceback", "damaged", "can't")), ran.err
        check_files(tmp_path)


@pytest.mark.parametrize(("seed", "n_kills"), SEEDS_AND_KILLS)
@pytest.mark.sample(0)
def test_a_profile_killed_at_any_moment(kernels: Path, tmp_path: Path, seed: int, n_kills: int) -> None:
    """Measured again each time, first without an earlier profile, then beside one that stays in use. Most kernels are
    there: the test above compiles them."""
    with_kernels(tmp_path, kernels)
    chance = random.Random(seed)
    kill_runs(tmp_path, (*PROFILE, "--refresh"), n_kills, 8.0, chance)
    ran = ended(tmp_path, PROFILE)
    assert ran.code == 0 and "Traceback" not in ran.err and "can't" not in ran.err, ran.err
    assert from_json(HardwareProfile, ran.out).cpu and json.loads(ran.out)["kind"] == "measured"
    check_files(tmp_path)
