"""Stores that are damaged or hostile; most are signed again, so that another check than the checksum's has to speak.

Every wrong value of every field of a manifest is in test_manifest.py.
"""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee import DamagedStoreError, Engine, StoreError
from tests.bad_models import CONFIG, SINGLE, TOKENIZER, Spoil, check_refusal, content, sparse

MANIFEST, WEIGHTS = "manifest.json", "weights.bin"
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def made(tiny: Path, kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A good store."""
    cache = tmp_path_factory.mktemp("made")
    (cache / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETERO_EE_CACHE_DIR", str(cache))
        Engine.from_pretrained(tiny, quantizer="rtn", threads=1).close()
    [store] = (folder for folder in (cache / "stores").iterdir() if folder.is_dir())
    yield store


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def signed(body: dict[str, Any]) -> bytes:
    """The manifest with the checksum that belongs to it."""
    body.pop("sha256", None)
    text = json.dumps(body, indent=1).removesuffix("\n}").encode()
    return text + f',\n "sha256": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def manifest(change: Edit) -> Spoil:
    def spoil(folder: Path) -> None:
        body = json.loads((folder / MANIFEST).read_text())
        change(body)
        (folder / MANIFEST).write_bytes(signed(body))

    return spoil


def entry(layout: str, change: Edit) -> Spoil:
    """Changes the first tensor of that layout."""
    return manifest(lambda body: change(next(each for each in body["entries"] if each["layout"] == layout)))


def field(name: str, value: Any) -> Spoil:
    return manifest(lambda body: body.update({name: value}))


def values(layout: str, offset: str, checksum: str, data: bytes) -> Spoil:
    """Other bytes at the beginning of a region, with the checksum that belongs to them."""

    def spoil(folder: Path) -> None:
        body = json.loads((folder / MANIFEST).read_text())
        changed = next(each for each in body["entries"] if each["layout"] == layout)
        weights = bytearray((folder / WEIGHTS).read_bytes())
        start = changed[offset]
        others = [each[name] for each in body["entries"] for name in ("offset", "scales_offset")]
        end = min([place for place in others if place > start], default=len(weights))
        weights[start : start + len(data)] = data
        lengths = range(end - start, len(data) - 1, -2)  # the region without the padding behind
        before = (folder / WEIGHTS).read_bytes()
        [size] = {n for n in lengths if hashlib.sha256(before[start : start + n]).hexdigest() == changed[checksum]}
        changed[checksum] = hashlib.sha256(weights[start : start + size]).hexdigest()
        (folder / WEIGHTS).write_bytes(weights)
        (folder / MANIFEST).write_bytes(signed(body))

    return spoil


def config(**changes: Any) -> Spoil:
    """Another config.json, and in the manifest its checksum."""

    def spoil(folder: Path) -> None:
        data = json.dumps(json.loads((folder / CONFIG).read_text()) | changes).encode()
        (folder / CONFIG).write_bytes(data)
        known = {"name": CONFIG, "n_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest(lambda body: body.update(files=[f for f in body["files"] if f["name"] != CONFIG] + [known]))(folder)

    return spoil


def flipped(name: str, place: int) -> Spoil:
    """One bit, counted from the file's beginning or end."""

    def spoil(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)

    return spoil


BAD: dict[str, tuple[Spoil, str]] = {
    "manifest empty": (content(MANIFEST, b""), "can't be read"),
    "manifest of something else": (content(MANIFEST, b'{"manifest_version": 3}'), "is not the manifest"),
    "manifest nested": (content(MANIFEST, b"[" * 100_000), "nested too deeply"),
    "manifest of a terabyte": (sparse(MANIFEST, 2**40), "a manifest has at most"),
    "manifest of a million objects": (content(MANIFEST, b"[" + b"{}," * 10**6 + b"{}]"), "at most"),
    "a future version": (field("version", 99), "store format version 99"),
    "version that rings": (field("version", "\x07\x1b[2J"), "store format version"),
    "no tensors": (field("entries", []), "the last tensor ends at byte 0"),
    "entries an object": (field("entries", {}), "entries: expected `array`, got `object`"),
    "a tensor lost": (manifest(lambda body: body["entries"].pop(0)), "impossible"),
    "the last tensor lost": (manifest(lambda body: body["entries"].pop()), "weights_bytes is"),
    "tensors in another order": (manifest(lambda body: body["entries"].reverse()), "impossible"),
    "a tensor renamed": (entry("int4", lambda e: e.update(name="layers.0.ffn.sideways")), "lacks"),
    "a name that clears the screen": (entry("fp32", lambda e: e.update(name="\x1b[2J")), "lacks"),
    "place negative": (entry("int4", lambda e: e.update(offset=-4096)), "impossible"),
    "place between pages": (entry("int4", lambda e: e.update(offset=e["offset"] + 64)), "impossible"),
    "shape of 2^40 x 2^40": (entry("int4", lambda e: e.update(shape=[2**40, 2**40])), "impossible"),
    "shape of 0": (entry("int4", lambda e: e.update(shape=[0, 48])), "impossible shape"),
    "rows and columns exchanged": (entry("int4", lambda e: e["shape"].reverse()), "do not match their checksum"),
    "a column less": (entry("int4", lambda e: e.update(shape=[e["shape"][0], e["shape"][1] - 1])), "has shape"),
    "layout unknown": (entry("int4", lambda e: e.update(layout="int2")), "impossible layout"),
    "int8 for int4": (entry("int4", lambda e: e.update(layout="int8", codebook=None)), "impossible"),
    "no codebook": (entry("int4", lambda e: e.update(codebook=None)), "impossible codebook"),
    "codebook not ascending": (entry("int4", lambda e: e["codebook"].reverse()), "impossible codebook"),
    "exponent of 3": (entry("int4", lambda e: e.update(exponent=3)), "impossible exponent"),
    "exponent NaN": (entry("int4", lambda e: e.update(exponent=float("nan"))), "NaN is not a number"),
    "checksum in capitals": (entry("int4", lambda e: e.update(sha256="A" * 64)), "impossible sha256"),
    "weights of a terabyte promised": (field("weights_bytes", 2**40), "weights_bytes is"),
    "a bit of the checksum": (flipped(MANIFEST, -10), "does not match its own checksum"),
    "a bit of what it is of": (flipped(MANIFEST, 250), "does not match its own checksum"),
    "weights cut by a byte": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-1]), "bytes"),
    "a bit of the last tensor": (flipped(WEIGHTS, -1), "do not match their checksum"),
    "scale infinite": (
        values("int4", "scales_offset", "scales_sha256", struct.pack("<e", float("inf"))),
        "not numbers",
    ),
    "scale NaN": (values("int8", "scales_offset", "scales_sha256", struct.pack("<H", 0x7E01)), "not numbers"),
    "norm NaN": (values("fp32", "offset", "sha256", struct.pack("<f", float("nan"))), "not numbers"),
    "norm minus infinity": (values("fp32", "offset", "sha256", struct.pack("<f", float("-inf"))), "not numbers"),
    "another model's config.json": (lambda f: (f / CONFIG).write_text("{}"), "its store's manifest says"),
    "a config.json for wider layers": (config(intermediate_size=80), "has shape"),
    "a config.json for more layers": (config(num_hidden_layers=4), "lacks"),
    "a config.json for fewer layers": (config(num_hidden_layers=2), "does not have"),
    "config.json lost": (lambda f: (f / CONFIG).unlink(), "is missing"),
    "tokenizer.json changed": (flipped(TOKENIZER, 50), "does not match its checksum"),
    "tokenizer.json lost": (lambda f: (f / TOKENIZER).unlink(), "is missing"),
    "a file unknown to the manifest": (content("merges.txt", b"a b"), "is not in the store's manifest"),
    "a file with a path": (manifest(lambda b: b["files"][0].update(name="../config.json")), "impossible name"),
    "weights a pipe": (lambda f: pipe(f / WEIGHTS), "is a pipe"),
    "weights a link out": (lambda f: link_out(f / WEIGHTS), "is a link out of its folder"),
    "manifest a link out": (lambda f: link_out(f / MANIFEST), "is a link out of its folder"),
    "tokenizer.json a link out": (lambda f: link_out(f / TOKENIZER), "is a link out of its folder"),
}


def pipe(file: Path) -> None:
    import os

    file.unlink()
    os.mkfifo(file)


def link_out(file: Path) -> None:
    """The good file lies beside the store now, and a link in its place."""
    file.rename(file.parent.parent / file.name)
    file.symlink_to(file.parent.parent / file.name)


NEVER_READ = ("a manifest has at most", "is a pipe", "is a link out of its folder")  # so no damage was seen


@pytest.mark.parametrize("name", BAD)
def test_a_bad_store_is_refused(store: Path, cache: Path, name: str) -> None:
    spoil, words = BAD[name]
    spoil(store)
    check_refusal(store, cache, StoreError if words in NEVER_READ else DamagedStoreError, words)


def test_the_good_store_opens(store: Path) -> None:
    manifest(lambda body: None)(store)
    with Engine.from_pretrained(store, threads=1) as engine:
        assert engine.generate("a", max_new_tokens=2).n_generated_tokens == 2


def test_a_manifest_beside_a_checkpoint_makes_it_a_store(own_tiny: Path, cache: Path) -> None:
    """What claims to be one is never read as the other."""
    (own_tiny / MANIFEST).write_text("{}")
    check_refusal(own_tiny, cache, DamagedStoreError, "is not the manifest")
    assert (own_tiny / SINGLE).exists()
