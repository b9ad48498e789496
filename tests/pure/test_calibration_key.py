"""Keys of calibrations: the same for the same weights, wherever and whenever they were made; others for all others."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetero_ee.calibration.location import checkpoint_key, store_key
from hetero_ee.errors import CheckpointError
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import QUANTIZER_CHANGES
from hetero_ee.weights.store.manifest import CopiedFile, Entry, Manifest
from hetero_ee.weights.store.source import Source

ENTRY = Entry("layers.0.ffn.up", "int4", (16, 32), 0, 4096, -3, tuple(range(-8, 8)), "a" * 64, "b" * 64)
MANIFEST = Manifest("codebook", "int8", {"model": "x"}, (CopiedFile("config.json", 5, "c" * 64),), 4128, (ENTRY,))


def test_where_a_store_came_from_does_not_matter() -> None:
    assert store_key(replace(MANIFEST, source={"model": "y", "files": [1]})) == store_key(MANIFEST)


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, quantizer="rtn"),
        replace(MANIFEST, entries=(replace(ENTRY, sha256="d" * 64),)),
        replace(MANIFEST, entries=(replace(ENTRY, scales_sha256="d" * 64),)),
        replace(MANIFEST, entries=(replace(ENTRY, exponent=-4),)),
        replace(MANIFEST, files=(CopiedFile("config.json", 5, "d" * 64),)),
    ],
    ids=["quantizer", "tiles", "scales", "exponent", "configuration"],
)
def test_everything_that_makes_the_weights_does(other: Manifest) -> None:
    assert store_key(other) != store_key(MANIFEST)


def test_a_checkpoint_is_known_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    key = checkpoint_key(tmp_path, Quantization())
    file.unlink()
    file.write_bytes(b"weights")
    assert checkpoint_key(tmp_path, Quantization()) == key
    assert checkpoint_key(tmp_path, Quantization(matrices="rtn")) != key
    file.write_bytes(b"Weights")
    assert checkpoint_key(tmp_path, Quantization()) != key
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    file.write_bytes(b"weights")
    assert checkpoint_key(tmp_path, Quantization()) != key


def test_a_quantizer_that_changes_changes_its_own_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    choices = Quantization(), Quantization(matrices="rtn")

    def keys() -> list[tuple[str, str]]:
        return [(checkpoint_key(tmp_path, each), Source.of(tmp_path).key(each)) for each in choices]

    codebook, rtn = keys()
    monkeypatch.setitem(QUANTIZER_CHANGES, "codebook", QUANTIZER_CHANGES["codebook"] + 1)
    changed, same = keys()
    assert same == rtn and not set(changed) & set(codebook)


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        checkpoint_key(tmp_path, Quantization())
