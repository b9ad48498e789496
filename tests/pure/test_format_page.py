"""docs/FORMAT.md: what it shows is what is written, and what it names is all there is."""

import hashlib
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.model_files import SMALL_FILES
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.quantizers import MAX_EXPONENT, MIN_EXPONENT
from hetero_ee.weights.store.conversion import SPACE_RESERVE
from hetero_ee.weights.store.journal import JOURNAL_FILE, journal_line
from hetero_ee.weights.store.manifest import (
    ALIGNMENT_BYTES,
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    CopiedFile,
    Entry,
    Manifest,
    read_manifest,
)
from hetero_ee.weights.store.writer import partial_folder
from tests.format_store import CODEBOOK, MATRIX, write_store

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("format"))


def page() -> str:
    return (ROOT / "docs" / "FORMAT.md").read_text(encoding="utf-8")


def test_the_page_shows_bytes_of_a_real_store(store: Path) -> None:
    weights = (store / "weights.bin").read_bytes()
    lines = re.findall(r"^([0-9a-f]{8}) ((?: [0-9a-f]{2})+)$", page(), re.MULTILINE)
    assert len(lines) == 8
    for place, values in lines:
        shown = bytes.fromhex(values)
        assert len(shown) == 16 and weights[int(place, 16) :].startswith(shown), place


def test_the_page_shows_an_entry_and_weights_of_that_store(store: Path) -> None:
    shown = re.search(r"```json\n(.*?)```", page(), re.DOTALL)
    assert shown and json.loads(shown[1]) == json.loads((store / "manifest.json").read_text())["entries"][MATRIX]
    entry = read_manifest(store).entries[MATRIX]
    codes = layout.unpack(region(store, entry.offset, 9 * 256).view(3, 3, 256))
    scales = layout.unpack_scales(region(store, entry.scales_offset, 9 * 32).view(torch.float16).view(3, 3, 16))
    rows = re.findall(r"^\| W\[(\d+), (\d+)\] \| (\S+) \| (\S+) \| (\S+) \| (.*) = (\S+) \|$", page(), re.MULTILINE)
    assert len(rows) == 3
    for n, k, code, value, scale, product, result in rows:
        assert int(code) == codes[int(n), int(k)] and int(value) == CODEBOOK[int(code)]
        assert int(scale) == scales[int(n), int(k) // 32] and product == f"2^-21 x {scale} x {value}"
        assert float(result) == 2.0**-21 * int(scale) * int(value)


def region(store: Path, offset: int, n_bytes: int) -> torch.Tensor:
    return torch.tensor(list((store / "weights.bin").read_bytes()[offset : offset + n_bytes]), dtype=torch.uint8)


def test_the_page_names_every_field_and_limit() -> None:
    tables = re.findall(r"^\| `(\w+)` \| (?:string|integer|list|object|list or null) \|", page(), re.MULTILINE)
    header = [*(field.name for field in fields(Manifest)), "sha256"]
    assert tables == header + [field.name for kind in (CopiedFile, Entry) for field in fields(kind)]
    for fact in (
        f"version {FORMAT_VERSION}",
        f"multiple of {ALIGNMENT_BYTES} bytes",
        f"{MIN_EXPONENT} to {MAX_EXPONENT}",
    ):
        assert fact in page()
    assert f"{MAX_MANIFEST_BYTES // 2**20} MiB" in page() and f"`{FORMAT_NAME}`" in page()


def test_the_page_names_every_copied_file() -> None:
    listed = re.search(r"^These are copied, where the model has them: (.*?)\.$", page(), re.MULTILINE | re.DOTALL)
    assert listed and re.findall(r"`(.*?)`", listed[1]) == list(SMALL_FILES)


def test_the_page_names_what_lies_beside_a_store() -> None:
    for name in ("NAME.lock", partial_folder(Path("NAME")).name, JOURNAL_FILE):
        assert f"`{name}`" in page()
    assert f"{SPACE_RESERVE} times the room" in page()


def test_a_journal_is_what_the_page_says(store: Path) -> None:
    """SHA-256, a blank and JSON in every line."""
    entry = read_manifest(store).entries[MATRIX]
    line = journal_line(entry).decode()
    checksum, _, text = line.removesuffix("\n").partition(" ")
    assert line.count("\n") == 1 and checksum == hashlib.sha256(text.encode()).hexdigest()
    assert json.loads(text) == json.loads((store / "manifest.json").read_text())["entries"][MATRIX]


def test_the_page_names_every_tensor() -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    spec = read_spec(config | {"intermediate_size": 16, "vocab_size": 9, "attention_bias": True, "mlp_bias": True})
    spec = replace(spec, norm="layer", qk_norm=True, post_norm=True, learned_position_offset=2)
    models = [
        replace(spec, gated=gated, neuron_major=by_neuron) for gated in (False, True) for by_neuron in (False, True)
    ]
    names = {tensor.name.replace(".0.", ".*.") for model in models for tensor in all_tensors(decoder_blocks(model))}
    shown = set(re.findall(r"`((?:embedding|layers|final_norm|head)\.[\w.*]+)`", page()))
    assert shown == names | {"layers.L.mtp.fc"}
