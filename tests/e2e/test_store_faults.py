"""Conversions on a disk that fails: the old state stays, nothing is left behind, and the error says what to do."""

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import CheckpointError, DiskFullError, StoreError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert, planned_bytes
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee.weights.store.reader import is_store, open_store
from hetero_ee.weights.store.verification import verify
from tests.store_support import FaultyDisk, contents, interrupted, made_store

KINDS_OF_CALL = {
    *("create_folder", "create_file", "write", "allocate", "close_durably", "sync_folder", "rename", "remove_file"),
    *("free_bytes", "acquire_lock"),
}
RESUMING = {"reopen_file", "truncate"}


def fail_everywhere(model_folder: Path, folder: Path, whole: dict[str, bytes], resume: bool, **how: Any) -> set[str]:
    """Converts with a fault in the first call, then in the second, and so on until none is hit.

    Each time with an old store beside it and, to be resumed, half a conversion. Returns which calls have failed.
    """
    target, failed = folder / "store", set()
    made_store(model_folder, folder / "neighbour")
    before = contents(folder)
    for fail_at in range(1, 1000):
        disk = FaultyDisk(fail_at, **how)
        if resume:
            interrupted(model_folder, target)
        try:
            made_store(model_folder, target, files=disk)
        except StoreError as error:
            assert str(folder) in str(error) and str(error).isprintable() and str(error).endswith(".")
            assert isinstance(error, DiskFullError) == (getattr(disk.error, "errno", 0) == errno.ENOSPC)
        if len(disk.calls) < fail_at:
            break
        failed.add(disk.calls[fail_at - 1])
        if is_store(target):  # then it is whole: its name was given before the fault, and could not be taken back
            assert disk.lasting or disk.calls[fail_at - 1] == "rename"
            assert contents(target) == whole
            FileSystem().remove_tree(target)
        if disk.lasting or disk.calls[fail_at - 1] == "acquire_lock":  # without the lock it is not ours to remove
            shutil.rmtree(folder / "store.partial", ignore_errors=True)
        assert contents(folder) == before, f"call {fail_at}, {disk.calls[fail_at - 1]}"
    assert contents(target) == whole
    assert contents(folder).keys() == before.keys() | {"store", *(f"store/{name}" for name in whole)}
    return failed


@pytest.mark.sample(1)
@pytest.mark.few(5)
@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resumed"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_failing_call_leaves_nothing(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], code: int, late: bool, resume: bool
) -> None:
    error = OSError(code, os.strerror(code))
    failed = fail_everywhere(model_folder, tmp_path, whole, resume, error=error, late=late)
    assert failed == (KINDS_OF_CALL - {"create_folder"} | RESUMING if resume else KINDS_OF_CALL)


@pytest.mark.sample(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resumed"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_stays_broken_gives_a_store_error(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], code: int, resume: bool
) -> None:
    """Broken, read-only or forbidden from the n-th call on."""
    error = OSError(code, os.strerror(code))
    assert "write" in fail_everywhere(model_folder, tmp_path, whole, resume, error=error, lasting=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resumed"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_interrupt_anywhere_is_gone_on_from(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], late: bool, resume: bool
) -> None:
    """Whatever it left, the next conversion makes the same store, and leaves nothing else."""
    target = tmp_path / "store"
    for fail_at in range(1, 1000):
        disk = FaultyDisk(fail_at, KeyboardInterrupt(), late=late)
        if resume:
            interrupted(model_folder, target)
        try:
            made_store(model_folder, target, files=disk)
        except KeyboardInterrupt:
            partial = (tmp_path / "store.partial").exists()
            notes = getattr(disk.error, "__notes__", [])
            assert bool(notes) == (partial and "acquire_lock" in disk.calls[: fail_at - 1])
            disk.error.__dict__.pop("__notes__", None)
        assert contents(made_store(model_folder, target)) == whole
        assert {path.name for path in tmp_path.iterdir()} == {"store"}
        if len(disk.calls) < fail_at:
            break
        FileSystem().remove_tree(target)
    assert fail_at > 30


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device without room")
def test_a_disk_that_fills_up_in_a_write_is_a_full_disk(model_folder: Path, tmp_path: Path) -> None:
    class FullDisk(FileSystem):
        def create_file(self, file: Path) -> Any:
            return Path("/dev/full").open("wb", buffering=0) if file.name == "weights.bin" else Path.open(file, "xb")

        def allocate(self, file: Any, n_bytes: int) -> None:
            pass

    with pytest.raises(DiskFullError, match="No space left"):
        made_store(model_folder, tmp_path / "stores" / "store", files=FullDisk())
    assert not contents(tmp_path / "stores")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["write", "allocate", "close_durably", "create_folder"])
def test_a_full_disk_and_a_quota_have_an_error_of_their_own(
    model_folder: Path, tmp_path: Path, name: str, code: int
) -> None:
    class FullDisk(FileSystem):
        pass

    def full(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    disk = FullDisk()
    setattr(disk, name, full)
    with pytest.raises(DiskFullError, match=os.strerror(code)):
        made_store(model_folder, tmp_path / "stores" / "store", files=disk)
    assert not contents(tmp_path / "stores")


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_disk_that_can_not_allocate_or_sync_folders_will_do(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def unsupported(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    def sync_file(descriptor: int) -> None:
        unsupported() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else sync(descriptor)

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    monkeypatch.setattr(os, "fsync", sync_file)
    assert contents(made_store(model_folder, tmp_path / "store")) == whole


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_disk_without_locks_is_said_so(
    model_folder: Path, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(StoreError, match="has no file locks"):
        made_store(model_folder, tmp_path / "store")
    assert not contents(tmp_path)


@pytest.mark.parametrize("matrices", ["rtn", "int8"])
def test_too_little_space_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path, matrices: str
) -> None:
    spec, quantization = read_spec(model_folder), Quantization(matrices=matrices)
    target = tmp_path / "stores" / "store"

    class SmallDisk(FileSystem):
        def free_bytes(self, folder: Path) -> int:
            return free

    n_weights_bytes = planned_bytes(all_tensors(decoder_blocks(spec)), quantization)
    n_small_bytes = sum(file.stat().st_size for file in model_folder.iterdir() if file.suffix == ".json")
    enough = int(1.05 * (n_weights_bytes + n_small_bytes)) + 2**20
    free = enough - 1
    with pytest.raises(DiskFullError, match="MiB free"):
        convert(model_folder, spec, target, quantization, files=SmallDisk())
    assert not contents(target.parent)
    free = enough
    assert (convert(model_folder, spec, target, quantization, files=SmallDisk()) / "weights.bin").stat().st_size == (
        n_weights_bytes
    )


def test_what_a_conversion_has_already_is_not_asked_for_again(
    model_folder: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    class SmallDisk(FileSystem):
        def free_bytes(self, folder: Path) -> int:
            allocated = (tmp_path / "store.partial" / "weights.bin").stat().st_blocks * 512
            return int(1.05 * sum(map(len, whole.values()))) + 2**20 - allocated

    assert interrupted(model_folder, tmp_path / "store")
    assert contents(made_store(model_folder, tmp_path / "store", files=SmallDisk())) == whole


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_folder_that_may_not_be_written_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stores"
    folder.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        made_store(model_folder, folder / "store")


def test_a_damaged_checkpoint_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_folder / "model.safetensors")
    tensors["model.norm.weight"][7] = float("nan")  # nearly the last one to be converted
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        made_store(folder, tmp_path / "stores" / "store")
    assert not contents(tmp_path / "stores")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("change", ["touched", "longer", "gone"])
def test_a_source_that_changes_meanwhile_leaves_nothing(
    model_folder: Path, tmp_path: Path, name: str, change: str
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))

    def edit(stage: str, n_done: int, n_all: int) -> None:
        if n_done == n_all:
            file = folder / name
            data = file.read_bytes()
            file.unlink()
            if change != "gone":
                file.write_bytes(data + b" " * (change == "longer"))

    with pytest.raises(CheckpointError, match=r"changed during the conversion|can't be read|holds no weights"):
        made_store(folder, tmp_path / "stores" / "store", progress=edit)
    assert not contents(tmp_path / "stores")


def test_what_is_no_store_is_never_overwritten(model_folder: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "diary.txt").write_text("mine")
    file.write_text("mine too")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken.partial").mkdir()
    (tmp_path / "taken.partial" / "diary.txt").write_text("mine as well")
    (tmp_path / "linked.partial").symlink_to(folder)
    before = contents(tmp_path)
    for name in ("folder", "file", "file/below", "link", "empty", "taken", "linked"):
        with pytest.raises(StoreError, match=r"can't be written|in the way"):
            made_store(model_folder, tmp_path / name, progress=lambda *_: pytest.fail("converted for nothing"))
        assert contents(tmp_path) == before


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("name", ["weights.bin", "journal", "config.json", "manifest.json"])
def test_nothing_is_written_through_a_link(model_folder: Path, tmp_path: Path, name: str, link: str) -> None:
    """A partial folder whose files somebody has replaced by links to files elsewhere."""
    interrupted(model_folder, tmp_path / "store")
    place = tmp_path / "store.partial" / name
    data = place.read_bytes() if place.exists() else b"old"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(data)
    place.unlink(missing_ok=True)
    getattr(place, link)(elsewhere)
    try:
        assert verify(made_store(model_folder, tmp_path / "store")) == ()
    except StoreError as error:
        assert "in the way" in str(error) or "another name" in str(error)
    assert elsewhere.read_bytes() == data


def test_a_store_is_not_made_twice(model_folder: Path, tmp_path: Path) -> None:
    made_store(model_folder, tmp_path / "store")
    disk = FaultyDisk(0, OSError())
    assert made_store(model_folder, tmp_path / "store", files=disk) == tmp_path / "store"
    assert not disk.calls


def test_an_empty_folder_that_appears_meanwhile_stays(model_folder: Path, tmp_path: Path) -> None:
    """A rename would put the store in its place."""

    class Slow(FileSystem):
        def remove_file(self, file: Path) -> None:
            super().remove_file(file)
            (tmp_path / "store").mkdir()

    with pytest.raises(StoreError, match="created there meanwhile"):
        made_store(model_folder, tmp_path / "store", files=Slow())
    assert contents(tmp_path) == {"store": b""}


def test_a_store_that_appears_meanwhile_stays(model_folder: Path, tmp_path: Path) -> None:
    """One that somebody has moved there, without a look at the lock."""
    other = made_store(model_folder, tmp_path / "other")
    before, target = contents(other), tmp_path / "both"

    class Slow(FileSystem):
        def rename(self, source: Path, target: Path) -> None:
            other.rename(target)
            source.rename(target)

    assert made_store(model_folder, target, files=Slow()) == target
    assert contents(target) == before
    open_store(target, read_spec(target))
