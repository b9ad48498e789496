"""The stores in the cache folder: listed as they are, found by name, removed at once and nothing else."""

import errno
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import DamagedStoreError, ModelError, StoreError, UsageError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.filesystem import FileSystem, allocated_bytes, store_lock
from hetero_ee.weights.store.library import (
    StoreState,
    make_store,
    open_cached,
    remove_stored,
    stored_model,
    stored_models,
)
from tests.store_support import FAST, FaultyDisk, contents, interrupted, one_layer_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_layer_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def cache(model_folder: Path, tmp_path: Path) -> Path:
    """A cache folder with one store."""
    make_store(model_folder, cache=tmp_path / "cache", quantizer="rtn")
    return tmp_path / "cache"


def only_store(cache: Path) -> Path:
    (path,) = (path for path in (cache / "stores").iterdir() if path.is_dir())
    return path


def test_a_store_is_listed_with_what_its_manifest_says(cache: Path) -> None:
    (model,) = stored_models(cache)
    assert model.path == only_store(cache) == cache / "stores" / model.name
    assert (model.model, model.architecture, model.quantizer) == ("tiny", "LlamaForCausalLM", "rtn")
    assert model.state is StoreState.WHOLE
    n_bytes = sum(file.stat().st_size for file in model.path.iterdir())
    assert n_bytes <= model.n_bytes < n_bytes + 8 * 4096
    assert 0 <= model.last_used_s - (model.path / "weights.bin").stat().st_mtime < 60


def test_a_model_from_a_hugging_face_cache_has_its_id(model_folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--some-org--Tiny-1" / "snapshots" / ("0" * 40)
    shutil.copytree(model_folder, snapshot)
    store = make_store(snapshot, cache=tmp_path / "cache", quantizer="rtn")
    assert store.name.startswith("some-org_Tiny-1-rtn-")
    (model,) = stored_models(tmp_path / "cache")
    assert model.model == "some-org/Tiny-1"


def test_no_cache_folder_has_no_stores(tmp_path: Path) -> None:
    assert stored_models(tmp_path / "nowhere") == []


def another_version(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))


STATES: dict[str, tuple[Callable[[Path], Any], StoreState]] = {
    "another version": (another_version, StoreState.OTHER_VERSION),
    "cut": (lambda store: os.truncate(store / "weights.bin", 9), StoreState.DAMAGED),
    "no manifest": (lambda store: (store / "manifest.json").unlink(), StoreState.DAMAGED),
    "no JSON": (lambda store: (store / "manifest.json").write_text("{"), StoreState.DAMAGED),
    "small file changed": (lambda store: (store / "config.json").write_text("{}"), StoreState.DAMAGED),
    "nothing in it": (lambda store: [file.unlink() for file in store.iterdir()], StoreState.DAMAGED),
}


@pytest.mark.parametrize("name", STATES)
def test_damaged_stores_and_those_of_other_versions_are_listed_and_removable(cache: Path, name: str) -> None:
    damage, state = STATES[name]
    damage(only_store(cache))
    (model,) = stored_models(cache)
    assert model.state is state
    remove_stored(model, cache)
    assert stored_models(cache) == []
    assert contents(cache / "stores") == {}


def test_unfinished_stores_are_listed_and_removable(model_folder: Path, tmp_path: Path) -> None:
    assert interrupted(model_folder, tmp_path / "stores" / "tiny")
    (model,) = stored_models(tmp_path)
    assert (model.name, model.state) == ("tiny.partial", StoreState.UNFINISHED) and model.n_bytes > 10_000
    remove_stored(model, tmp_path)
    assert contents(tmp_path / "stores") == {}


def test_a_store_is_found_by_the_beginning_of_its_name(model_folder: Path, cache: Path) -> None:
    first = only_store(cache)
    second = make_store(model_folder, cache=cache, quantizer="search")
    for name, expected in ((first.name, first), ("tiny-r", first), (second.name, second), ("tiny-s", second)):
        assert stored_model(cache, name).path == expected
    with pytest.raises(UsageError, match=r"is the beginning of 2 stores' names \(tiny-rtn-\w+, tiny-search-\w+\)"):
        stored_model(cache, "tiny")
    for name in ("", "other", "../stores", "\x1b[2J", str(first)):
        with pytest.raises(UsageError, match="there is no store") as caught:
            stored_model(cache, name)
        assert str(caught.value).isprintable()
    exact = first.with_name("tiny")
    shutil.copytree(first, exact)
    assert stored_model(cache, "tiny").path == exact  # although it begins two others


def test_only_stores_below_the_cache_are_listed_and_removed(cache: Path, tmp_path: Path) -> None:
    stores = cache / "stores"
    elsewhere = Path(shutil.copytree(only_store(cache), tmp_path / "elsewhere"))
    (stores / "mine").mkdir()
    (stores / "mine" / "diary.txt").write_text("dear diary")
    (stores / "linked").symlink_to(elsewhere)
    (stores / "file").write_text("x")
    mixed = Path(shutil.copytree(elsewhere, stores / "mixed"))
    (mixed / "diary.txt").write_text("dear diary")
    (stores / "deep").mkdir()
    (stores / "deep" / "manifest.json").mkdir()
    before = contents(tmp_path)
    listed = {model.name: model for model in stored_models(cache)}
    assert "mine" not in listed and "file" not in listed
    for model in listed.values():
        if model.path != only_of_ours(listed):
            with pytest.raises(StoreError, match="remove it by hand"):
                remove_stored(model, cache)
    for other in (tmp_path, tmp_path / "other", cache / "stores"):
        with pytest.raises(StoreError, match="remove it by hand"):
            remove_stored(next(model for model in listed.values() if model.path == only_of_ours(listed)), other)
    assert contents(tmp_path) == before


def only_of_ours(listed: dict[str, Any]) -> Path:
    return next(model.path for name, model in listed.items() if name.startswith("tiny-rtn"))


def test_a_store_that_is_being_written_is_not_removed(cache: Path) -> None:
    (model,) = stored_models(cache)
    before = contents(cache)
    with store_lock(model.path, FileSystem(), lambda: None), pytest.raises(StoreError, match="another process"):
        remove_stored(model, cache)
    assert contents(cache) == before


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_removal_that_fails_leaves_the_store_or_none(model_folder: Path, tmp_path: Path, late: bool) -> None:
    """Never half a store under its name."""
    for fail_at in range(1, 10):
        cache = tmp_path / str(fail_at)
        store = make_store(model_folder, cache=cache, quantizer="rtn")
        before = contents(store)
        disk = FaultyDisk(fail_at, OSError(errno.EIO, os.strerror(errno.EIO)), late=late)
        (model,) = stored_models(cache)
        try:
            remove_stored(model, cache, disk)  # type: ignore[arg-type]
        except StoreError as error:
            assert "can't be written" in str(error)
        assert not store.exists() or contents(store) == before
        for left in stored_models(cache):
            remove_stored(left, cache)
        assert contents(cache / "stores") == {}
        if len(disk.calls) < fail_at:
            break
    assert fail_at == 5  # lock, rename, sync, delete, and then none


def test_a_damaged_store_that_another_process_has_mended_stays(model_folder: Path, cache: Path) -> None:
    """Two find it damaged at once: the second must not remove what the first has made meanwhile."""
    store, spec = only_store(cache), read_spec(model_folder)
    whole = contents(store)
    os.truncate(store / "weights.bin", 9)
    n_removed: list[Path] = []
    barrier = threading.Barrier(2)

    class Watched(FileSystem):
        def rename(self, source: Path, target: Path) -> None:
            if source == store:
                n_removed.append(source)
            super().rename(source, target)

        def acquire_lock(self, file: Path, waiting: Callable[[], None]) -> Any:
            if not n_removed and barrier.n_waiting < 2 and not barrier.broken:
                barrier.wait(20)
            return super().acquire_lock(file, waiting)

    def mend() -> None:
        path, weights = open_cached(model_folder, spec, FAST, cache, files=Watched())
        assert path == store and weights.n_weights > 0

    threads = [threading.Thread(target=mend) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert contents(store) == whole and len(n_removed) == 1


def refuse_to_open(patch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """No file of that name can be opened, or mapped for the name "mmap"."""
    real = os.open

    def refused(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        file = Path(path)
        return (refused if file.name == name and "stores" in file.parts else real)(path, *arguments, **options)

    patch.setattr(*((mmap, "mmap", refused) if name == "mmap" else (os, "open", opened)))


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "weights.bin", "mmap"])
def test_a_store_that_can_not_be_read_just_now_stays(model_folder: Path, cache: Path, name: str, number: int) -> None:
    spec, before = read_spec(model_folder), (only_store(cache) / "weights.bin").stat()
    with pytest.MonkeyPatch.context() as patch:
        refuse_to_open(patch, name, number)
        with pytest.raises(StoreError) as caught:
            open_cached(model_folder, spec, FAST, cache)
    assert not isinstance(caught.value, DamagedStoreError) and os.strerror(number) in str(caught.value)
    now = (only_store(cache) / "weights.bin").stat()  # made again, it would have the same bytes
    assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_store_that_looked_damaged_and_can_not_be_read_now_stays(
    model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = read_spec(model_folder), only_store(cache)
    os.truncate(store / "weights.bin", 9)
    before = contents(cache)

    class Busy(FileSystem):
        def acquire_lock(self, file: Path, waiting: Callable[[], None]) -> Any:
            refuse_to_open(monkeypatch, "manifest.json", errno.EMFILE)
            return super().acquire_lock(file, waiting)

    with pytest.raises(StoreError):
        open_cached(model_folder, spec, FAST, cache, files=Busy())
    monkeypatch.undo()
    assert contents(cache) == before


def test_room_on_a_disk_that_does_not_count_blocks_is_the_size() -> None:
    assert allocated_bytes(os.stat_result((0, 0, 0, 0, 0, 0, 5, 0, 0, 0))) == 5


def test_a_store_that_is_there_is_opened_before_it_is_taken(model_folder: Path, tmp_path: Path) -> None:
    store = convert(model_folder, read_spec(model_folder), tmp_path / "store", FAST)
    (store / "tokenizer.json").write_text("[]")
    with pytest.raises(DamagedStoreError, match=r"tokenizer\.json does not match its checksum"):
        make_store(model_folder, cache=tmp_path, output=store, quantizer="rtn")


def test_a_store_whose_floats_have_another_quantizer_is_another(model_folder: Path, tmp_path: Path) -> None:
    """Both would be named by the codes that were kept."""
    mixed = Quantization(matrices="search", own="rtn")
    store = convert(model_folder, read_spec(model_folder), tmp_path / "store", mixed)
    with pytest.raises(UsageError, match="not the store of this model"):
        make_store(model_folder, cache=tmp_path, output=store, quantizer="rtn")


def test_what_could_not_be_opened_is_not_converted(model_folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))
    os.truncate(model / "tokenizer.json", 2**26 + 1)
    with pytest.raises(ModelError, match=r"tokenizer\.json has 67108865 bytes"):
        make_store(model, cache=tmp_path / "cache", quantizer="rtn")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        make_store(model, cache=tmp_path / "cache", quantizer="rtn")
    assert stored_models(tmp_path / "cache") == []


def test_a_home_that_is_not_there_is_no_output(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such home folder"):
        make_store(model_folder, cache=tmp_path, output=Path("~nobody-of-this-name/store"))


def test_a_store_goes_to_a_folder_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    def made(output: Path, **options: Any) -> Path:
        return make_store(model_folder, cache=tmp_path / "cache", output=output, **{"quantizer": "rtn"} | options)

    store = made(tmp_path / "deep" / "store")
    before = contents(tmp_path)
    assert made(store) == store
    for output in (tmp_path, tmp_path / "deep"):
        with pytest.raises(UsageError, match="there already"):
            made(output)
    with pytest.raises(UsageError, match="not the store of this model"):
        made(store, quantizer="search")
    with pytest.raises(UsageError, match="is already a store"):
        make_store(store, cache=tmp_path / "cache")
    for quantizer in ("none", "int4", ""):
        with pytest.raises(UsageError, match="codebook, search, rtn"):
            made(tmp_path / "other", quantizer=quantizer)
    os.utime(model_folder / "model.safetensors", ns=(2, 2))
    with pytest.raises(UsageError, match="not the store of this model"):
        made(store)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before["link"] = b""
    with pytest.raises(UsageError, match="there already"):
        made(tmp_path / "link")
    assert contents(tmp_path) == before
