"""Manifests by the hundred thousand, most of them signed: refused by a StoreError, or read as their JSON says."""

import hashlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import StoreError
from hetero_ee.weights.store.manifest import CHECKSUM_FIELD, parsed_manifest
from hetero_ee.weights.store.names import MANIFEST_FILE
from tests.fuzz.mutation import change_text, mutated

GOLDEN = Path(__file__).parents[1] / "golden" / "manifest.json"


def signed(text: bytes) -> bytes:
    """The text of a manifest without its end, with the end that belongs to it."""
    return text + f'{CHECKSUM_FIELD}{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def check_manifest(folder: Path, data: bytes) -> bool:
    """Whether the manifest is accepted. Anything but a StoreError of one line, or other numbers than its own, fails."""
    (folder / MANIFEST_FILE).write_bytes(data)
    try:
        manifest = parsed_manifest(folder)
    except StoreError as error:
        assert str(error).isprintable() and len(str(error)) < 800 and str(folder) in str(error)
        return False
    assert without_checksum(manifest.to_json()) == without_checksum(data)
    places = [region for entry in manifest.entries for region in entry.regions]
    assert all(one.end <= other.offset for one, other in itertools.pairwise(places))
    assert all(len(region.sha256) == len(bytes.fromhex(region.sha256)) * 2 == 64 for region in places)
    assert max((region.end for region in places), default=0) == manifest.weights_bytes
    return True


def without_checksum(data: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(data).items() if name != "sha256"}


def fuzz(seeds: range, folder: Path) -> int:
    """How many of the inputs were good ones."""
    body, n_accepted = without_checksum(GOLDEN.read_bytes()), 0
    for seed in seeds:
        rng = random.Random(seed)
        data = signed(mutated(body, rng).removesuffix(b"}").removesuffix(b"\n"))
        if rng.random() < 0.1:
            data = change_text(data, rng)
        try:
            n_accepted += check_manifest(folder, data)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {data!r}: {error!r}") from error
    return n_accepted


def test_the_golden_manifest_is_accepted(memory_folder: Path) -> None:
    assert check_manifest(memory_folder, GOLDEN.read_bytes())


def test_two_thousand_manifests(memory_folder: Path) -> None:
    assert 20 < fuzz(range(2_000), memory_folder) < 1_000


@pytest.mark.slow
def test_a_million_manifests(memory_folder: Path) -> None:
    assert fuzz(range(10**6), memory_folder) > 10_000
