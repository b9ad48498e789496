"""Power failures at every call of a conversion: a store is whole or not there, and what is left is gone on with."""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_ee.weights.store.filesystem import FileSystem
from tests.power_loss import Disk, RecordingDisk
from tests.store_support import contents, interrupted, made_store

STORE = "stores/store"


class Nothing(random.Random):
    """Draws that no change is kept which was not made durable."""

    def random(self) -> float:
        return 1.0


def crash_everywhere(
    model_folder: Path,
    folder: Path,
    whole: dict[str, bytes],
    n_draws: int = 1,
    before: Path | None = None,
    forgets: Callable[[str, Path], bool] | None = None,
) -> int:
    """Converts, crashes after each call and in several ways, and converts on what is left. Returns how many crashes.

    n_draws: random survivors of each crash, beside those that have kept everything and nothing. before: the state of
    the disk at the beginning, durable. forgets: calls that have no effect on the simulated disk; nothing is then
    converted again.
    """
    root = folder / "recorded"
    shutil.copytree(before, root) if before else root.mkdir()
    disk = Disk(root)
    recorder = RecordingDisk(root, forgets or (lambda name, path: False))
    made_store(model_folder, root / STORE, files=recorder)
    n_crashes = 0
    for number, call in enumerate([None, *recorder.log]):
        if call is not None:
            disk.replay(call)
        for choose in [None, Nothing(), *(random.Random(f"{number} {draw}") for draw in range(n_draws))]:
            left = folder / "left"
            disk.survivor(left, choose)
            if (left / STORE).exists():
                is_whole = contents(left / STORE) == whole  # pytest would take half a minute to show how not
                assert is_whole, f"after call {number}, {call and call[:2]}: not whole"
            assert number < len(recorder.log) or (left / STORE).exists(), "a finished store is gone"
            if not forgets:
                made_store(model_folder, left / STORE)
                assert contents(left / STORE) == whole, f"after call {number}, {call and call[:2]}: not the same bytes"
                assert {path.name for path in (left / "stores").iterdir()} <= {"store", "store.lock"}
            FileSystem().remove_tree(left)
            n_crashes += 1
    return n_crashes


N_DRAWS = [1, pytest.param(30, marks=pytest.mark.slow)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("n_draws", N_DRAWS)
def test_a_crash_leaves_no_store_or_a_whole_one(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], n_draws: int
) -> None:
    assert crash_everywhere(model_folder, tmp_path, whole, n_draws) > 50 * n_draws


@pytest.mark.parametrize("n_draws", N_DRAWS)
@pytest.mark.sample(0)
def test_a_crash_of_a_resumed_conversion(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], n_draws: int
) -> None:
    before = tmp_path / "before"
    (before / "stores").mkdir(parents=True)
    assert interrupted(model_folder, before / STORE)
    assert crash_everywhere(model_folder, tmp_path, whole, n_draws, before) > 25 * n_draws


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_crash_after_crash_after_crash(model_folder: Path, tmp_path: Path, whole: dict[str, bytes], seed: int) -> None:
    """What one crash has left is what the next conversion crashes on, some times over."""
    choose = random.Random(seed)
    before = tmp_path / "0"
    before.mkdir()
    for number in itertools.count(1):
        root, left = tmp_path / f"recorded {number}", tmp_path / str(number)
        shutil.copytree(before, root)
        disk, recorder = Disk(root), RecordingDisk(root)
        made_store(model_folder, root / STORE, files=recorder)
        for call in recorder.log[: choose.randrange(len(recorder.log))]:
            disk.replay(call)
        disk.survivor(left, choose)
        if (left / STORE).exists() or number == 6:
            break
        before = left
    assert contents(made_store(model_folder, left / STORE)) == whole


@pytest.mark.parametrize(
    ("flush", "of"),
    [
        ("sync_file", "weights.bin"),
        ("sync_file", "manifest.json"),
        ("sync_file", "tokenizer.json"),
        ("sync_folder", "store.partial"),
        ("sync_folder", "stores"),
        ("sync_folder", "recorded"),  # the folder above
    ],
)
@pytest.mark.sample(1)
def test_without_one_of_the_flushes_a_crash_shows(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], flush: str, of: str
) -> None:
    """That the simulation can tell: each flush that is left out breaks what the tests above promise."""
    with pytest.raises(AssertionError, match=r"not whole|is gone"):
        crash_everywhere(model_folder, tmp_path, whole, 8, forgets=lambda name, path: (name, path.name) == (flush, of))
