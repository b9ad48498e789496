"""A store's calibration goes with it, and nothing else does."""

import errno
import os
from pathlib import Path

import pytest

from hetero_ee.errors import StoreError
from hetero_ee.weights.store.calibration_files import calibration_folder, has_calibration
from hetero_ee.weights.store.filesystem import FileSystem, store_lock
from hetero_ee.weights.store.library import make_store, remove_stored, stored_models
from tests.store_support import FaultyDisk, contents, one_layer_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_layer_model(tmp_path_factory.mktemp("models") / "tiny")


def calibrated(model_folder: Path, cache: Path, *ends: str) -> Path:
    """A store with folders like calibrations beside it, and with what two broken off ones would leave."""
    store = make_store(model_folder, cache=cache, quantizer="rtn")
    for end in ends or ("", ".new", ".old"):
        folder = store.with_name(f"{store.name}.calibration{end}")
        folder.mkdir()
        for name in ("calibration.json", "calibration.safetensors"):
            (folder / name).write_text(name)
    for name in (f"{store.name}.calibration.partial", f"{store.name}.calibration.partial.new"):
        store.with_name(name).write_text("half")
    return store


def test_a_calibration_and_its_remains_go_with_the_store(model_folder: Path, tmp_path: Path) -> None:
    calibrated(model_folder, tmp_path)
    (tmp_path / "stores" / "other.calibration").mkdir()
    (model,) = (model for model in stored_models(tmp_path) if model.name != "other.calibration")
    assert model.has_calibration
    remove_stored(model, tmp_path)
    assert [each.name for each in (tmp_path / "stores").iterdir() if each.suffix != ".lock"] == ["other.calibration"]


def test_a_broken_off_calibration_is_none_and_goes_too(model_folder: Path, tmp_path: Path) -> None:
    calibrated(model_folder, tmp_path, ".new")
    (model,) = stored_models(tmp_path)
    assert not model.has_calibration
    remove_stored(model, tmp_path)
    assert contents(tmp_path / "stores") == {}


def with_a_diary(folder: Path) -> None:
    (folder / "diary.txt").write_text("dear diary")


def with_a_folder(folder: Path) -> None:
    (folder / "calibration.safetensors").unlink()
    (folder / "calibration.safetensors").mkdir()


def linked(folder: Path) -> None:
    elsewhere = folder.parents[2] / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize("change", [with_a_diary, with_a_folder, linked])
def test_what_is_not_a_calibration_alone_stays_and_so_does_the_store(
    model_folder: Path, tmp_path: Path, change: object
) -> None:
    store = calibrated(model_folder, tmp_path / "cache")
    change(calibration_folder(store))  # type: ignore[operator]
    (model,) = stored_models(tmp_path / "cache")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="holds more than a calibration; remove it by hand"):
        remove_stored(model, tmp_path / "cache")
    assert contents(tmp_path) == before


def test_a_model_that_is_being_calibrated_is_not_removed(model_folder: Path, tmp_path: Path) -> None:
    store = calibrated(model_folder, tmp_path)
    (model,) = stored_models(tmp_path)
    before = contents(tmp_path)
    with (
        store_lock(calibration_folder(store), FileSystem(), lambda: None),
        pytest.raises(StoreError, match="is being calibrated by another process"),
    ):
        remove_stored(model, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_removal_that_fails_leaves_a_whole_calibration_or_none(
    model_folder: Path, tmp_path: Path, late: bool
) -> None:
    for fail_at in range(1, 20):
        cache = tmp_path / str(fail_at)
        store = calibrated(model_folder, cache)
        disk = FaultyDisk(fail_at, OSError(errno.EIO, os.strerror(errno.EIO)), late=late)
        (model,) = stored_models(cache)
        try:
            remove_stored(model, cache, disk)  # type: ignore[arg-type]
        except StoreError as error:
            assert "can't be written" in str(error)
        assert not has_calibration(store) or (calibration_folder(store) / "calibration.safetensors").exists()
        assert store.exists() or not calibration_folder(store).exists()
        for left in stored_models(cache):
            remove_stored(left, cache)
        assert contents(cache / "stores") == {}
        if len(disk.calls) < fail_at:
            break
    assert fail_at > 10


def test_a_calibration_that_is_half_removed_counts_as_none(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = calibrated(model_folder, tmp_path)
    (model,) = stored_models(tmp_path)

    def remove_tree(self: FileSystem, folder: Path) -> None:
        (folder / "calibration.safetensors").unlink()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "remove_tree", remove_tree)
        with pytest.raises(StoreError, match="can't be written"):
            remove_stored(model, tmp_path)
    assert store.is_dir() and not has_calibration(store)
    remove_stored(model, tmp_path)
    assert contents(tmp_path / "stores") == {}
