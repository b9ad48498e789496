"""A conversion that was stopped is gone on with, and what it left is believed as far as its checksums hold."""

import os
import random
import shutil
from pathlib import Path

import pytest

from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.store.manifest import read_manifest
from tests.store_support import contents, interrupted, made_store


@pytest.fixture
def target(model_folder: Path, tmp_path: Path) -> Path:
    """Where a store goes, of which half is written."""
    assert interrupted(model_folder, tmp_path / "store")
    return tmp_path / "store"


def n_tensors_read(model_folder: Path, target: Path) -> int:
    """Converts; how many tensors it had to read from the checkpoint."""
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        real = Checkpoint.values
        patch.setattr(Checkpoint, "values", lambda self, name, *more: (read.append(name), real(self, name, *more))[1])
        made_store(model_folder, target)
    return len(read)


def test_what_is_done_is_not_done_again(model_folder: Path, target: Path, whole: dict[str, bytes]) -> None:
    n_tensors = len(read_manifest(made_store(model_folder, target.with_name("other"))).entries)
    n_done = len((target.with_name("store.partial") / "journal").read_bytes().splitlines()) - 1
    assert 0 < n_done < n_tensors
    assert n_tensors_read(model_folder, target) == n_tensors - n_done
    assert contents(target) == whole


def test_what_two_conversions_have_done_is_not_done_again(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    for share in (0.4, 0.7):
        assert interrupted(model_folder, tmp_path / "store", share)
    n_done = len((tmp_path / "store.partial" / "journal").read_bytes().splitlines()) - 1
    assert n_done > 5
    n_read = n_tensors_read(model_folder, tmp_path / "store")
    assert n_read + n_done == len(read_manifest(tmp_path / "store").entries)
    assert contents(tmp_path / "store") == whole


def test_progress_comes_to_its_end(model_folder: Path, target: Path) -> None:
    calls: list[tuple[int, int]] = []
    made_store(model_folder, target, progress=lambda _, n_done, n_all: calls.append((n_done, n_all)))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1]


@pytest.mark.parametrize("seed", range(20))
def test_torn_and_altered_lines_of_a_journal_are_not_believed(
    model_folder: Path, target: Path, whole: dict[str, bytes], seed: int
) -> None:
    journal, choose = target.with_name("store.partial") / "journal", random.Random(seed)
    data = bytearray(journal.read_bytes())
    place = choose.randrange(len(data))
    flipped = bytearray(data)
    flipped[place] ^= 1 << choose.randrange(8)
    left = [flipped, data[:place], data[:place] + bytes(50), data + b"\xff\n\r\n{}", data[:place] + data]
    journal.write_bytes(left[seed % len(left)])
    assert contents(made_store(model_folder, target)) == whole


def test_lines_in_another_order_or_twice_are_not_believed(
    model_folder: Path, target: Path, whole: dict[str, bytes]
) -> None:
    journal = target.with_name("store.partial") / "journal"
    first, *others = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([first, *reversed(others)]))
    assert contents(made_store(model_folder, target)) == whole
    shutil.rmtree(target)
    interrupted(model_folder, target)
    journal.write_bytes(b"".join([first, others[0], *others]))
    assert contents(made_store(model_folder, target)) == whole


@pytest.mark.parametrize("damage", ["flipped", "padding", "cut", "longer", "empty", "gone"])
def test_bytes_that_are_not_as_they_were_written_are_written_anew(
    model_folder: Path, target: Path, whole: dict[str, bytes], damage: str
) -> None:
    weights = target.with_name("store.partial") / "weights.bin"
    data = bytearray(weights.read_bytes())
    entries = read_manifest(made_store(model_folder, target.with_name("other"))).entries
    padding = next(region.end for entry in entries[1:] for region in entry.regions if region.end % 4096)
    if damage in ("flipped", "padding"):
        data[padding - (damage == "flipped")] ^= 1
    if damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes({"cut": data[:7000], "longer": data + b"x" * 10**6, "empty": b""}.get(damage, data))
    n_read = n_tensors_read(model_folder, target)
    assert contents(target) == whole
    assert (n_read == len(entries)) == (damage in ("cut", "empty", "gone"))  # not even the first tensor was whole


def test_what_lies_behind_the_last_right_tensor_is_cut_at_once(model_folder: Path, target: Path) -> None:
    """Not only when the store is whole: until then it would take room for nothing."""
    partial = target.with_name("store.partial")
    before = contents(partial)
    for name in ("weights.bin", "journal"):
        with (partial / name).open("ab") as file:
            file.write(b"x" * 10**6)
    assert interrupted(model_folder, target)
    assert contents(partial) == before


def test_a_partial_store_of_something_else_is_made_anew(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    other = Path(shutil.copytree(model_folder, tmp_path / "other"))
    os.utime(other / "model.safetensors", ns=(1, 1))
    assert interrupted(other, tmp_path / "store")
    assert n_tensors_read(model_folder, tmp_path / "store") == len(read_manifest(tmp_path / "store").entries)
    assert contents(tmp_path / "store") == whole
