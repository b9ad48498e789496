"""Weights overwritten in place while they are open: found between texts, where the file's times have changed."""

import os
import shutil
import time
from pathlib import Path

import pytest

from hetero_ee import CheckpointError, Engine, StoreError
from hetero_ee.weights.file_watch import FileWatch
from hetero_ee.weights.store.manifest import read_manifest
from tests.server_support import serving

N_LOOKS = 2000
PROMPT = "Once upon a time"


def text(engine: Engine) -> tuple[int, ...]:
    return engine.generate(PROMPT, max_new_tokens=8).token_ids


def overwrite(file: Path, offset: int, n_bytes: int) -> None:
    """Other bytes in place, and the file's own times again: ctime alone tells of it."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(bytes(n_bytes))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def store(tiny: Path, cache: Path, tmp_path: Path) -> Path:
    Engine.from_pretrained(tiny, quantizer="rtn", threads=1).close()
    (made,) = (folder for folder in (cache / "stores").iterdir() if folder.is_dir())
    return Path(shutil.copytree(made, tmp_path / "store"))


@pytest.mark.parametrize("part", ["scales", "values"])
def test_a_store_overwritten_between_texts(store: Path, part: str) -> None:
    regions = [region for entry in read_manifest(store).entries for region in entry.regions if region.part == part]
    with Engine.from_pretrained(store, threads=1) as engine:
        text(engine)
        overwrite(store / "weights.bin", regions[0].offset, regions[0].n_bytes)
        for _ in range(2):  # it does not get better
            with pytest.raises(StoreError, match="do not match their checksum"):
                text(engine)


def test_a_store_overwritten_during_a_text(store: Path) -> None:
    region = next(r for entry in read_manifest(store).entries for r in entry.regions if r.part == "scales")
    with Engine.from_pretrained(store, threads=1) as engine:
        tokens = engine.stream(PROMPT, max_new_tokens=8)
        next(tokens)
        overwrite(store / "weights.bin", region.offset, region.n_bytes)
        with pytest.raises(StoreError, match="do not match their checksum"):
            list(tokens)


def test_a_server_of_damaged_weights_says_so(store: Path) -> None:
    region = next(r for entry in read_manifest(store).entries for r in entry.regions if r.part == "scales")
    with Engine.from_pretrained(store, threads=1) as engine, serving(engine) as server:
        assert server.get("/health").status_code == 200
        overwrite(store / "weights.bin", region.offset, region.n_bytes)
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 500
        health = server.get("/health")
        assert health.status_code == 503 and "overwritten" in health.json()["reason"]


def test_what_is_no_change_of_the_weights(store: Path) -> None:
    with Engine.from_pretrained(store, threads=1) as engine:
        expected = text(engine)
        (store / "weights.bin").touch()  # other times, the same bytes
        assert text(engine) == expected
        (store / "weights.bin").rename(store / "moved")
        (store / "weights.bin").write_bytes(b"another file")
        assert text(engine) == expected
        (store / "weights.bin").unlink()
        assert text(engine) == expected


def test_a_checkpoint_overwritten_in_place(tiny: Path, tmp_path: Path, cache: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    file = folder / "model.safetensors"
    with Engine.from_pretrained(folder, quantizer="none", threads=1) as engine:
        text(engine)
        overwrite(file, file.stat().st_size // 2, 4096)
        with pytest.raises(CheckpointError, match="was written to since it was opened"):
            text(engine)


def test_what_is_no_change_of_a_checkpoint(tiny: Path, tmp_path: Path, cache: Path) -> None:
    """Its times of change are others each time, its content and the time it was written are not."""
    folder = Path(shutil.copytree(tiny, tmp_path / "copy"))
    file = folder / "model.safetensors"
    with Engine.from_pretrained(folder, quantizer="none", threads=1) as engine:
        expected = text(engine)
        file.chmod(0o600)
        assert text(engine) == expected
        os.link(file, tmp_path / "another name")
        assert text(engine) == expected
        (tmp_path / "another name").unlink()
        assert text(engine) == expected
        file.touch()  # samples alone can't tell that no byte is another
        with pytest.raises(CheckpointError, match="was written to since it was opened"):
            text(engine)


def test_a_look_costs_microseconds(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watch = FileWatch([tmp_path / "file"], lambda file: None)
    begun_s = time.perf_counter()
    for _ in range(N_LOOKS):
        watch.look()
    assert (time.perf_counter() - begun_s) / N_LOOKS < 100e-6
