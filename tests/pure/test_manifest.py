"""The manifest: written in one way, and read with suspicion: any change to it is refused in one sentence."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.errors import StoreError
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.weights import tiles as layout
from hetero_ee.weights.filesystem import LocalFileSystem
from hetero_ee.weights.manifest import (
    ALIGNMENT_BYTES,
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    Entry,
    Manifest,
    aligned,
    read_manifest,
)
from hetero_ee.weights.store import StoreWriter
from hetero_ee.weights.weight import LINEAR_CODEBOOK, MAX_EXPONENT, MIN_EXPONENT, TileWeight

ROOT = Path(__file__).parents[2]

GOLDEN = ROOT / "tests" / "golden" / "manifest.json"
CODEBOOK = (-127, -96, -71, -52, -38, -26, -15, -5, 4, 14, 25, 37, 51, 70, 95, 126)
SOURCE = {"model": "tiny", "architecture": "LlamaForCausalLM", "files": {"model.safetensors": 12345}}
MATRIX, VOCABULARY, VECTOR = 0, 1, 2  # places of the entries in the store below
Edit = Callable[[dict[str, Any]], Any]


def grid(n_rows: int, n_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.meshgrid(torch.arange(n_rows), torch.arange(n_columns), indexing="ij")
    return rows, columns


def write_store(folder: Path) -> Path:
    """The store of docs/FORMAT.md: fixed tensors, one of each layout, made without a quantizer."""
    n, k = grid(48, 96)
    scales = layout.pack_scales((16384 + 16 * n + 1024 * k)[:, :3].half())
    codes, values = ((7 * n + k + k // 3) % 16).to(torch.uint8), ((5 * n + 7 * k) % 255 - 127).to(torch.int8)
    with StoreWriter(folder / "store", LocalFileSystem()) as writer:
        writer.add_tiles("layers.0.ffn.up", TileWeight(layout.pack_int4(codes), scales, -21, CODEBOOK, 40, 70))
        writer.add_tiles("embedding.tokens", TileWeight(layout.pack_int8(values), scales, -14, None, 48, 96))
        writer.add_values("final_norm.norm", torch.arange(70) / 64)
        return writer.finish(folder, "codebook", "int8", SOURCE)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("shared"))


def sign(body: dict[str, Any]) -> dict[str, Any]:
    """The body with the checksum that belongs to it, computed as docs/FORMAT.md says."""
    body.pop("sha256", None)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return body | {"sha256": hashlib.sha256(text.encode("ascii")).hexdigest()}


def tamper(store: Path, edit: Edit) -> None:
    """Edits the manifest and signs it again, so that only the check under test can object."""
    file = store / "manifest.json"
    body = json.loads(file.read_text())
    edit(body)
    file.write_text(json.dumps(sign(body)))


def refusal(store: Path) -> str:
    """The one sentence with which the store is refused."""
    with pytest.raises(StoreError) as caught:
        read_manifest(store)
    sentence = str(caught.value)
    assert sentence.isprintable() and sentence.endswith(".") and str(store) in sentence
    assert len(sentence) < 300 + 2 * len(str(store))
    return sentence


def test_what_is_written_is_what_is_read(store: Path) -> None:
    manifest = read_manifest(store)
    assert (manifest.quantizer, manifest.vocabulary_quantizer, manifest.source) == ("codebook", "int8", SOURCE)
    weights = (store / "weights.bin").read_bytes()
    assert manifest.weights_bytes == len(weights)
    assert manifest.weights_sha256 == hashlib.sha256(weights).hexdigest()
    matrix, vocabulary, vector = manifest.entries
    assert matrix == Entry("layers.0.ffn.up", "int4", (40, 70), 0, 4096, -21, CODEBOOK)
    assert vocabulary == Entry("embedding.tokens", "int8", (48, 96), 8192, 16384, -14, None)
    assert vector == Entry("final_norm.norm", "fp32", (70,), 20480, 0, 0, None)
    assert manifest.to_json() == (store / "manifest.json").read_bytes()


def test_a_store_of_version_1_has_the_golden_bytes(store: Path) -> None:
    """The golden manifest holds the checksum of weights.bin: other bytes there need another version too."""
    assert (store / "manifest.json").read_text() == GOLDEN.read_text()


def test_the_checksum_is_the_one_of_the_documentation(store: Path) -> None:
    body = json.loads((store / "manifest.json").read_text())
    assert list(body)[-1] == "sha256" and sign(dict(body)) == body


def test_regions_are_whole_pages_apart(store: Path) -> None:
    assert [aligned(offset) for offset in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    regions = [region for entry in read_manifest(store).entries for region in entry.regions]
    for (start, n_bytes), (following, _) in itertools.pairwise(regions):
        assert following == aligned(start + n_bytes)


NOT_TEXT: list[Any] = [None, True, 7, 0.5, [], {}]
NOT_OBJECT: list[Any] = [None, False, 7, "", "{}", [], [["a", 1]]]
NOT_LIST: list[Any] = [None, True, 7, "abc", {}, {"a": 1}]
NOT_INTEGER: list[Any] = [None, True, 0.5, 4096.0, math.nan, math.inf, -math.inf, "4096", "", [], [4096], {}]
FAR: list[Any] = [-1, -4096, 1, 4095, 2**31, 2**63, 2**64 + 4096, 10**30, -(10**30), 10**4000]
NOT_INTEGERS: list[Any] = [*NOT_LIST, [None, 70], [True, 70], [40.0, 70], ["40", 70], [[40], 70], [math.nan, 70]]
NO_SHAPE: list[Any] = [[], [40, 70, 1], [0, 70], [-40, 70], [-40, -70], [2**40, 2**40], [10**30, 1]]
NO_CODEBOOK: list[Any] = [
    [],
    list(range(15)),
    list(range(17)),
    list(range(120, 136)),
    list(range(-130, -114)),
    [0] * 16,
    [7, *range(15)],
    [10**30] * 16,
]
HEADER = {
    "format": [*NOT_TEXT, "", "hetero_ee", "GGUF"],
    "version": [*NOT_INTEGER, 0, -1, 2, 2**64, 1.0, "1"],
    "quantizer": NOT_TEXT,
    "vocabulary_quantizer": NOT_TEXT,
    "source": NOT_OBJECT,
    "weights_bytes": [*NOT_INTEGER, *FAR, 0],
    "weights_sha256": NOT_TEXT,
    "entries": [*NOT_LIST, [None], [7], ["abc"], [[]], [{}], [[["name", "a"]]]],
}
ENTRY = {
    "name": NOT_TEXT,
    "layout": [*NOT_TEXT, "", "int3", "INT4", "fp16"],
    "shape": [*NOT_INTEGERS, *NO_SHAPE],
    "offset": [*NOT_INTEGER, *FAR, 4096, 2**20],
    "scales_offset": [*NOT_INTEGER, *FAR, 2**20],
    "exponent": [*NOT_INTEGER, -127, 113, 2**31, 10**30],
}


def refuse_each(store: Path, edits: list[Edit], word: str = "") -> None:
    """Each edit by itself, on the original manifest."""
    original = (store / "manifest.json").read_bytes()
    assert edits
    for edit in edits:
        tamper(store, edit)
        assert word in refusal(store)
        (store / "manifest.json").write_bytes(original)
    read_manifest(store)


def changed(field: str, value: Any, place: int | None = None) -> Edit:
    return lambda body: (body if place is None else body["entries"][place]).update({field: value})


def without(field: str, place: int | None = None) -> Edit:
    return lambda body: (body if place is None else body["entries"][place]).pop(field)


@pytest.mark.parametrize("field", HEADER)
def test_a_field_missing_or_wrong_is_refused(store: Path, field: str) -> None:
    refuse_each(store, [without(field), *(changed(field, value) for value in HEADER[field])])


@pytest.mark.parametrize("place", [MATRIX, VOCABULARY, VECTOR])
@pytest.mark.parametrize("field", ENTRY)
def test_a_field_of_an_entry_missing_or_wrong_is_refused(store: Path, field: str, place: int) -> None:
    refuse_each(store, [without(field, place)], word=f"field '{field}' is missing")
    right = json.loads((store / "manifest.json").read_text())["entries"][place][field]
    refuse_each(store, [changed(field, value, place) for value in ENTRY[field] if value != right])


@pytest.mark.parametrize("value", [*NOT_INTEGERS, *NO_CODEBOOK], ids=str)
def test_a_codebook_is_16_ascending_int8_values(shared_store: Path, value: Any) -> None:
    if value is not None:
        refuse_each(shared_store, [changed("codebook", value, place) for place in (MATRIX, VOCABULARY, VECTOR)])
    else:
        refuse_each(shared_store, [changed("codebook", None, MATRIX)], word="'layers.0.ffn.up'")


def test_only_int4_has_a_codebook(shared_store: Path) -> None:
    for place in (VOCABULARY, VECTOR):
        refuse_each(shared_store, [changed("codebook", list(LINEAR_CODEBOOK), place)], word="impossible codebook")
        refuse_each(shared_store, [without("codebook", place)], word="is missing")


def test_fp32_has_neither_exponent_nor_scales(shared_store: Path) -> None:
    refuse_each(shared_store, [changed("exponent", 1, VECTOR)], word="exponent")
    refuse_each(shared_store, [changed("scales_offset", 4096, VECTOR)], word="scales_offset")


def test_unknown_fields_are_refused(shared_store: Path) -> None:
    """Whatever a later version adds may change what the rest means."""
    refuse_each(shared_store, [changed("zero_points", 1), changed("sparse", True, MATRIX)], word="is unknown")


def test_a_tensor_named_twice_is_refused(shared_store: Path) -> None:
    refuse_each(shared_store, [changed("name", "embedding.tokens", MATRIX)], word="'embedding.tokens' is there 2 times")


def test_regions_that_overlap_or_go_backwards_are_refused(shared_store: Path) -> None:
    def swap(body: dict[str, Any]) -> None:
        body["entries"].reverse()

    edits: list[Edit] = [
        swap,
        changed("scales_offset", 0, MATRIX),
        changed("scales_offset", 8192, MATRIX),
        changed("offset", 4096, VOCABULARY),
        changed("scales_offset", 12288, VOCABULARY),
        changed("offset", 16384, VECTOR),
        changed("shape", [64, 256], MATRIX),
        changed("shape", [71, 64], VECTOR),
    ]
    refuse_each(shared_store, edits, word="is impossible")


def test_another_version_is_said_so(shared_store: Path) -> None:
    refuse_each(shared_store, [changed("version", 2)], word="has store format version 2, this engine reads version 1")


def test_an_unsigned_change_is_refused(store: Path) -> None:
    """Every character of the file counts, but for white space between the tokens."""
    file = store / "manifest.json"
    text = file.read_text()
    for old, new in (("-21", "-20"), ('"codebook"', '"search"'), ("12345", "12346"), ('"sha256": "', '"sha256": "0')):
        assert old in text
        file.write_text(text.replace(old, new, 1))
        assert "checksum" in refusal(store)
    file.write_text(json.dumps({key: value for key, value in json.loads(text).items() if key != "sha256"}))
    assert "checksum" in refusal(store)


NO_MANIFESTS = {
    "empty": b"",
    "blank": b" \n",
    "not JSON": b"<html>",
    "cut": b'{"format": "hetero_ee store", "versi',
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "zeros": bytes(1000),
    "a list": b"[1, 2]",
    "a number": b"1e999",
    "null": b"null",
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "long number": b'{"version": ' + b"9" * 10_000 + b"}",
    "another format": b'{"format": "GGUF", "version": 1}',
}


@pytest.mark.parametrize("name", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused(store: Path, name: str) -> None:
    (store / "manifest.json").write_bytes(NO_MANIFESTS[name])
    refusal(store)


@pytest.mark.parametrize("depth", [100, 900, 990, 5_000])
def test_deep_nesting_behind_a_right_format_is_refused(store: Path, depth: int) -> None:
    """What the parser still takes may be too deep for the checksum."""
    text = '{"format": "hetero_ee store", "version": 1, "source": ' + '{"a":' * depth + "1" + "}" * depth + "}"
    (store / "manifest.json").write_text(text)
    refusal(store)


def test_a_huge_file_is_refused_unread(store: Path) -> None:
    with (store / "manifest.json").open("ab") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    assert str(MAX_MANIFEST_BYTES + 1) in refusal(store)


def test_a_missing_manifest_is_refused(store: Path) -> None:
    (store / "manifest.json").unlink()
    refusal(store)
    (store / "manifest.json").mkdir()
    refusal(store)


def test_names_cannot_write_to_the_terminal(shared_store: Path) -> None:
    nasty = "\x1b[2J\n" + "x" * 10_000
    for place in (MATRIX, VECTOR):
        refuse_each(shared_store, [lambda body, i=place: body["entries"][i].update(name=nasty, offset=1)])
        refuse_each(shared_store, [lambda body, i=place: body["entries"][i].update({"name": nasty, nasty: 1})])
    refuse_each(shared_store, [changed("version", nasty), changed("layout", nasty, MATRIX), changed(nasty, 1)])


@pytest.mark.parametrize("change", [-1, 1, -4096, 4096])
def test_weights_of_another_size_are_refused(store: Path, change: int) -> None:
    size = (store / "weights.bin").stat().st_size
    with (store / "weights.bin").open("r+b") as file:
        file.truncate(size + change)
    assert f"has {size + change} bytes" in refusal(store)


def test_missing_weights_are_refused(store: Path) -> None:
    (store / "weights.bin").unlink()
    assert "weights.bin is missing" in refusal(store)
    (store / "weights.bin").mkdir()
    assert "weights.bin is missing" in refusal(store)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_bit_flip_goes_unnoticed(shared_store: Path, data: st.DataObject) -> None:
    """In the manifest: a store error, or white space. Never another exception."""
    file = shared_store / "manifest.json"
    original = file.read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    flipped = original[place] ^ data.draw(st.integers(1, 255))
    before = read_manifest(shared_store)
    file.write_bytes(original[:place] + bytes([flipped]) + original[place + 1 :])
    try:
        assert read_manifest(shared_store) == before
    except StoreError as error:
        assert str(error).isprintable()
    finally:
        file.write_bytes(original)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from([*HEADER, *ENTRY, "codebook"]), st.sampled_from([MATRIX, VOCABULARY, VECTOR]), JSON_VALUES)
@settings(max_examples=150, deadline=None)
def test_any_value_anywhere_gives_a_manifest_or_a_store_error(
    shared_store: Path, field: str, place: int, value: Any
) -> None:
    file = shared_store / "manifest.json"
    original = file.read_bytes()
    tamper(shared_store, changed(field, value, None if field in HEADER else place))
    try:
        assert isinstance(read_manifest(shared_store), Manifest)
    except StoreError as error:
        assert str(error).isprintable()
    finally:
        file.write_bytes(original)


# --- docs/FORMAT.md


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
    codes = layout.unpack_int4(region(store, entry.offset, 9 * 256).view(3, 3, 256))
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
    header = ["format", "version", *(field.name for field in fields(Manifest)), "sha256"]
    assert tables == header + [field.name for field in fields(Entry)]
    for fact in (
        f"version {FORMAT_VERSION}",
        f"multiple of {ALIGNMENT_BYTES} bytes",
        f"{MIN_EXPONENT} to {MAX_EXPONENT}",
    ):
        assert fact in page()
    assert f"{MAX_MANIFEST_BYTES // 2**20} MiB" in page() and f"`{FORMAT_NAME}`" in page()


def test_the_page_names_every_tensor() -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    spec = ModelSpec.from_hf(
        config | {"intermediate_size": 16, "vocab_size": 9, "attention_bias": True, "mlp_bias": True}
    )
    spec = replace(spec, norm="layer", qk_norm=True, learned_position_offset=2)
    models = [replace(spec, gated=gated) for gated in (False, True)]
    names = {tensor.name.replace(".0.", ".*.") for model in models for tensor in all_tensors(decoder_blocks(model))}
    shown = set(re.findall(r"`((?:embedding|layers|final_norm|head)\.[\w.*]+)`", page()))
    assert shown == names
