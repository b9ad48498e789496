"""Damage to a store: verify finds every bit of it, opening refuses all but that of tiles, which are read after it."""

import errno
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.errors import CheckpointError, DamagedStoreError, HeteroError, StoreError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.quantizers import QUANTIZERS
from hetero_ee.weights.store.manifest import Region, read_manifest
from hetero_ee.weights.store.reader import open_store
from hetero_ee.weights.store.verification import Finding, verify
from hetero_ee.weights.weight import TileWeight
from tests.format_store import write_store
from tests.store_support import contents, made_store, one_layer_model


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Left as it was found."""
    folder = tmp_path_factory.mktemp("models")
    return made_store(one_layer_model(folder / "tiny"), folder / "store")


@pytest.fixture
def store(shared_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_store, tmp_path / "store"))


def tile_bytes(store: Path) -> np.ndarray:
    """Which bytes of weights.bin opening does not look at: tiles, and what lies between the regions."""
    manifest = read_manifest(store)
    unread = np.ones(manifest.weights_bytes, bool)
    for entry in manifest.entries:
        for region in entry.regions:
            if region.part != "tiles":
                unread[region.offset : region.end] = False
    return unread


def tile_regions(store: Path) -> list[Region]:
    return [region for entry in read_manifest(store).entries for region in entry.regions if region.part == "tiles"]


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ (1 << bit % 8)]))


def opens(store: Path) -> bool:
    """What an engine does with a store, as far as weights and small files go."""
    try:
        open_store(store, read_spec(store))
    except HeteroError:
        return False
    return True


@pytest.mark.parametrize("n_flips", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(shared_store: Path, n_flips: int) -> None:
    """As many in each file, and in tiles, scales, fp32 tensors and padding as they come."""
    choose, unread = random.Random(0), tile_bytes(shared_store)
    files = sorted(shared_store.iterdir())
    n_unread = 0
    assert verify(shared_store) == () and opens(shared_store)
    for number in range(n_flips):
        file = files[number % len(files)]
        bit = choose.randrange(8 * file.stat().st_size)
        flip(file, bit)
        found = verify(shared_store)
        assert found and found[0].file == file.name, f"bit {bit} of {file.name}"
        if file.name == "weights.bin" and unread[bit // 8]:
            n_unread += 1
        else:
            assert not opens(shared_store), f"bit {bit} of {file.name}"
        flip(file, bit)
    assert verify(shared_store) == ()
    assert 0 < n_unread < n_flips / len(files)


def test_a_flip_is_named_with_its_tensor_and_place(store: Path) -> None:
    weights = store / "weights.bin"
    size = weights.stat().st_size
    for entry in read_manifest(store).entries:
        end = 0
        for region in entry.regions:
            flip(weights, 8 * region.end - 1)
            what = "does not match its checksum"
            assert verify(store) == (Finding("weights.bin", f"'{entry.name}' {region.part}", region.offset, what),)
            flip(weights, 8 * region.end - 1)
            end = region.end
        if end < size and end % 4096:
            flip(weights, 8 * end)
            (found,) = verify(store)
            assert (found.offset, found.what) == (end, "has a byte before it that is not 0")
            flip(weights, 8 * end)


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "weights cut": (lambda store: cut(store / "weights.bin", -1), "weights.bin"),
    "weights cut far": (lambda store: cut(store / "weights.bin", -50_000), "weights.bin"),
    "weights longer": (lambda store: cut(store / "weights.bin", 1), "weights.bin"),
    "weights gone": (lambda store: (store / "weights.bin").unlink(), "weights.bin"),
    "weights empty": (lambda store: (store / "weights.bin").write_bytes(b""), "weights.bin"),
    "weights a folder": (lambda store: as_folder(store / "weights.bin"), "weights.bin"),
    "manifest cut": (lambda store: cut(store / "manifest.json", -1), "manifest.json"),
    "manifest longer": (lambda store: cut(store / "manifest.json", 1), "manifest.json"),
    "manifest gone": (lambda store: (store / "manifest.json").unlink(), "manifest.json"),
    "config cut": (lambda store: cut(store / "config.json", -1), "config.json"),
    "config gone": (lambda store: (store / "config.json").unlink(), "config.json"),
    "config reformatted": (lambda store: (store / "config.json").write_text("{}"), "config.json"),
    "tokenizer a folder": (lambda store: as_folder(store / "tokenizer.json"), "tokenizer.json"),
    "a template too many": (lambda store: (store / "chat_template.jinja").write_text("x"), "chat_template.jinja"),
    "a generation config too many": (lambda store: (store / "merges.txt").mkdir(), "merges.txt"),
}


def cut(file: Path, n_bytes: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size + n_bytes)


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("name", DAMAGES)
def test_cut_missing_and_surplus_files_are_found_and_refused(store: Path, name: str) -> None:
    damage, file = DAMAGES[name]
    damage(store)
    found = verify(store)
    assert found and {finding.file for finding in found} == {file}
    assert all(str(finding).isprintable() and file in str(finding) for finding in found)
    with pytest.raises(HeteroError) as caught:
        open_store(store, read_spec(store) if file != "config.json" else None)  # type: ignore[arg-type]
    assert isinstance(caught.value, StoreError) and re.search(r"convert|expected a regular file", str(caught.value))


def test_other_surplus_files_are_found_and_do_no_harm(store: Path) -> None:
    (store / "notes\x1b[2J.txt").write_text("mine")
    (store / "folder").mkdir()
    assert [finding.file for finding in verify(store)] == ["'folder'", r"'notes\x1b[2J.txt'"]
    assert opens(store)


def test_what_is_no_store_is_said_so(tmp_path: Path) -> None:
    assert [finding.file for finding in verify(tmp_path)] == ["manifest.json"]
    (tmp_path / "file").touch()
    assert verify(tmp_path / "file") == (Finding("file", None, None, "is not a folder"),)
    assert verify(tmp_path / "nowhere") != ()
    assert verify(tmp_path / ("x" * 300)) == (Finding("x" * 300, None, None, "can't be read (File name too long)"),)


@pytest.mark.parametrize("name", ["weights.bin", "store", "config.json"])
def test_what_can_not_be_read_is_found(store: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if Path(path).name == name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments, **options)

        return call

    for home, function in ((os, "open"), (Path, "iterdir")):
        monkeypatch.setattr(home, function, refusing(getattr(home, function)))
    (found,) = verify(store)
    assert found.file == name and "Permission denied" in found.what


def test_tensors_that_do_not_fit_the_configuration_are_found(tmp_path: Path) -> None:
    (finding,) = verify(write_store(tmp_path))  # three tensors of no model
    assert "describes weights that can't be opened" in finding.what


def test_progress_comes_to_its_end_and_nothing_is_written(store: Path) -> None:
    before, calls = contents(store), []
    verify(store, lambda *call: calls.append(call))
    size = (store / "weights.bin").stat().st_size
    assert calls[-1] == ("Verifying", size, size) and [call[1] for call in calls] == sorted(call[1] for call in calls)
    assert contents(store) == before


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_scales_that_are_no_numbers_are_refused(
    tmp_path: Path, shared_store: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At conversion; and by verify in a store whose checksums say that it was written so."""
    model = one_layer_model(tmp_path / "model")
    real = QUANTIZERS["rtn"]

    def broken(*arguments: Any) -> TileWeight:
        weight = real(*arguments)
        weight.scales[-1, -1, -1] = value
        return weight

    monkeypatch.setitem(QUANTIZERS, "rtn", broken)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.qkv has scales that are not finite"):
        made_store(model, tmp_path / "store")
    assert not (tmp_path / "store.partial").exists()
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(tensor.shape, dtype=torch.bool))
    made = made_store(model, tmp_path / "store")
    (first, *_) = verify(made)
    assert "holds 1 numbers that are not finite" in first.what and first.part == "'layers.0.attention.qkv' scales"


def test_a_manifest_of_other_small_files_is_refused(store: Path) -> None:
    """Each of those that are there has to be in the manifest."""
    manifest = read_manifest(store)
    (store / "manifest.json").write_bytes(replace(manifest, files=manifest.files[1:]).to_json())
    with pytest.raises(StoreError, match=r"config\.json is not in the store's manifest; put the original back"):
        open_store(store, read_spec(store))


def test_every_flipped_bit_of_tiles_is_found_soon_after_opening(shared_store: Path) -> None:
    choose, unread = random.Random(1), np.flatnonzero(tile_bytes(shared_store))
    tiles = [
        region for entry in read_manifest(shared_store).entries for region in entry.regions if region.part == "tiles"
    ]
    flipped = [8 * choose.randrange(region.offset, region.end) + choose.randrange(8) for region in tiles * 8]
    assert len(flipped) > 40 and {bit // 8 for bit in flipped} <= set(unread.tolist())
    for bit in flipped:
        flip(shared_store / "weights.bin", bit)
        watch = open_store(shared_store, read_spec(shared_store)).watch
        assert watch is not None
        with pytest.raises(DamagedStoreError, match=r"the tiles of tensor .* do not match their checksum"):
            for _ in range(1000):
                watch.look()
                time.sleep(0.01)
        flip(shared_store / "weights.bin", bit)


def test_tiles_overwritten_later_are_found(store: Path) -> None:
    watch = open_store(store, read_spec(store)).watch
    region = next(
        region for entry in read_manifest(store).entries for region in entry.regions if region.part == "tiles"
    )
    assert watch is not None
    watch.look()
    time.sleep(0.1)
    flip(store / "weights.bin", 8 * region.offset)
    with pytest.raises(DamagedStoreError, match="the tiles of tensor"):
        watch.look()
