"""The manifest: written in one way, and read with suspicion: any change to it is refused in one sentence."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_ee.errors import StoreError
from hetero_ee.weights.store.manifest import (
    MAX_MANIFEST_BYTES,
    CopiedFile,
    Entry,
    Manifest,
    aligned,
    matrix_bits,
    read_manifest,
)
from hetero_ee.weights.weight import LINEAR_CODEBOOK
from tests.format_store import (
    CODEBOOK,
    CONFIG,
    MATRIX,
    SOURCE,
    VECTOR,
    VOCABULARY,
    write_rows_store,
    write_store,
    write_zeros_store,
)

ROOT = Path(__file__).parents[2]

GOLDEN = ROOT / "tests" / "golden" / "manifest.json"
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("shared"))


def signed(body: dict[str, Any]) -> bytes:
    """The manifest with the checksum that belongs to it, computed as docs/FORMAT.md says."""
    text = json.dumps({name: value for name, value in body.items() if name != "sha256"}).removesuffix("}")
    return f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()


def tamper(store: Path, edit: Edit) -> None:
    """Edits the manifest and signs it again, so that only the check under test can object."""
    file = store / "manifest.json"
    body = json.loads(file.read_text())
    edit(body)
    file.write_bytes(signed(body))


def refusal(store: Path) -> str:
    """The one sentence with which the store is refused."""
    with pytest.raises(StoreError) as caught:
        read_manifest(store)
    sentence = str(caught.value)
    assert sentence.isprintable() and sentence.endswith(".") and str(store) in sentence
    assert len(sentence) < 300 + 2 * len(str(store))
    return sentence


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_what_is_written_is_what_is_read(store: Path) -> None:
    manifest = read_manifest(store)
    assert (manifest.quantizer, manifest.vocabulary_quantizer, manifest.source) == ("codebook", "int8", SOURCE)
    weights = (store / "weights.bin").read_bytes()
    assert manifest.weights_bytes == len(weights)
    assert manifest.files == (CopiedFile("config.json", len(CONFIG), sha256(CONFIG)),)
    matrix, vocabulary, vector = manifest.entries

    def checksums(*places: tuple[int, int]) -> list[str]:
        return [sha256(weights[offset : offset + n_bytes]) for offset, n_bytes in places]

    tiles, scales, int8_tiles, int8_scales = checksums((0, 9 * 256), (4096, 9 * 32), (8192, 9 * 512), (16384, 9 * 32))
    assert matrix == Entry("layers.0.ffn.up", "int4", (40, 70), 0, 4096, -21, CODEBOOK, tiles, scales)
    assert vocabulary == Entry("embedding.tokens", "int8", (48, 96), 8192, 16384, -14, None, int8_tiles, int8_scales)
    assert vector == Entry("final_norm.norm", "fp32", (70,), 20480, 0, 0, None, *checksums((20480, 280)), "")
    assert manifest.to_json() == (store / "manifest.json").read_bytes()


def test_a_store_of_version_2_has_the_golden_bytes(store: Path) -> None:
    """The golden manifest holds the checksums of all tensors: other bytes there need another version too."""
    assert (store / "manifest.json").read_text() == GOLDEN.read_text()


def test_a_store_of_version_3_has_the_golden_bytes(tmp_path: Path) -> None:
    """Of one with zero points; all others stay of version 2, which older engines read."""
    store = write_zeros_store(tmp_path)
    assert (store / "manifest.json").read_text() == GOLDEN.with_name("manifest_zeros.json").read_text()
    manifest = read_manifest(store)
    entry = manifest.entries[MATRIX]
    assert (manifest.version, entry.layout, entry.codebook) == (3, "int4 zeros", LINEAR_CODEBOOK)
    assert [region.n_bytes for region in entry.regions] == [9 * 256, 9 * 64]
    assert matrix_bits(manifest) == 8 * (9 * (256 + 64) + 9 * (512 + 32)) / (40 * 70 + 48 * 96)


def test_a_store_of_version_4_has_the_golden_bytes(tmp_path: Path) -> None:
    """Of one whose FFNs lie in rows whole."""
    store = write_rows_store(tmp_path)
    assert (store / "manifest.json").read_text() == GOLDEN.with_name("manifest_rows.json").read_text()
    manifest = read_manifest(store)
    assert (manifest.version, manifest.entries[MATRIX].layout) == (4, "int4 rows")
    assert manifest.neuron_major and manifest.first_in_rows
    assert [region.n_bytes for region in manifest.entries[MATRIX].regions] == [40 * 64, 40 * 8]


def test_a_version_that_does_not_fit_the_layouts_is_refused(shared_store: Path, tmp_path: Path) -> None:
    refuse_each(shared_store, [changed("version", 3)], word="version 3 does not fit the layouts")
    zeros_store = write_zeros_store(tmp_path)
    refuse_each(zeros_store, [changed("version", 2)], word="version 2 does not fit the layouts")
    refuse_each(zeros_store, [changed("version", 4)], word="version 4 does not fit the layouts")


def test_zero_points_go_with_linear_codes_alone(tmp_path: Path) -> None:
    store = write_zeros_store(tmp_path)
    refuse_each(store, [changed("codebook", value, MATRIX) for value in (list(CODEBOOK), None)], word="codebook")
    refuse_each(store, [changed("layout", kind, MATRIX) for kind in ("int4", "int8", "int4 rows", "int8 zeros")])


def test_the_checksum_is_the_one_of_the_documentation(store: Path) -> None:
    data = (store / "manifest.json").read_bytes()
    body = json.loads(data)
    assert list(body)[-1] == "sha256"
    text, found, end = data.rpartition(b',\n "sha256": "')
    assert found and end == f'{sha256(text)}"\n}}\n'.encode() and body["sha256"] == sha256(text)


def test_regions_are_whole_pages_apart(store: Path) -> None:
    assert [aligned(offset) for offset in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    regions = [region for entry in read_manifest(store).entries for region in entry.regions]
    for region, following in itertools.pairwise(regions):
        assert following.offset == aligned(region.offset + region.n_bytes)


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
NO_CHECKSUM: list[Any] = [*NOT_TEXT, "0", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "\u0660" * 64]
A_FILE = {"name": "config.json", "n_bytes": 23, "sha256": "0" * 64}
NO_FILE: list[Any] = [
    *({"name": name} for name in [*NOT_TEXT, "", "notes", "manifest.json", "weights.bin", "../config.json", "/"]),
    *({"n_bytes": value} for value in [None, True, -1, 23.0, "23"]),
    *({"sha256": value} for value in NO_CHECKSUM),
    {"mode": 1},
]
HEADER = {
    "format": [*NOT_TEXT, "", "hetero_ee", "GGUF"],
    "version": [*NOT_INTEGER, 0, -1, 1, 3, 2**64, 2.0, "2"],
    "quantizer": NOT_TEXT,
    "vocabulary_quantizer": NOT_TEXT,
    "source": NOT_OBJECT,
    "weights_bytes": [*NOT_INTEGER, *FAR, 0],
    "files": [*NOT_LIST, [None], [7], ["abc"], [[]], [{}], [A_FILE, A_FILE], *([A_FILE | wrong] for wrong in NO_FILE)],
    "entries": [*NOT_LIST, [None], [7], ["abc"], [[]], [{}], [[["name", "a"]]]],
}
ENTRY = {
    "name": NOT_TEXT,
    "layout": [*NOT_TEXT, "", "int3", "INT4", "fp16"],
    "shape": [*NOT_INTEGERS, *NO_SHAPE],
    "offset": [*NOT_INTEGER, *FAR, 4096, 2**20],
    "scales_offset": [*NOT_INTEGER, *FAR, 2**20],
    "exponent": [*NOT_INTEGER, -127, 3, 30, 113, 2**31, 10**30],
    "sha256": [*NO_CHECKSUM, ""],
    "scales_sha256": NO_CHECKSUM,
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
    refuse_each(store, [without(field, place)], word=f"{field} is missing")
    right = json.loads((store / "manifest.json").read_text())["entries"][place][field]
    refuse_each(store, [changed(field, value, place) for value in ENTRY[field] if value != right])


@pytest.mark.parametrize("field", ENTRY)
def test_a_field_of_a_matrix_with_zero_points_missing_or_wrong_is_refused(tmp_path: Path, field: str) -> None:
    store = write_zeros_store(tmp_path)
    refuse_each(store, [without(field, MATRIX)], word=f"{field} is missing")
    right = json.loads((store / "manifest.json").read_text())["entries"][MATRIX][field]
    refuse_each(store, [changed(field, value, MATRIX) for value in ENTRY[field] if value != right])


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
    refuse_each(shared_store, [changed("scales_sha256", "0" * 64, VECTOR)], word="scales_sha256")


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
        changed("weights_bytes", 20764),
        changed("scales_offset", 0, MATRIX),
        changed("scales_offset", 8192, MATRIX),
        changed("offset", 4096, VOCABULARY),
        changed("scales_offset", 12288, VOCABULARY),
        changed("offset", 16384, VECTOR),
        changed("shape", [64, 256], MATRIX),
        changed("shape", [71, 64], VECTOR),
    ]
    refuse_each(shared_store, edits)


def test_another_version_is_said_so(shared_store: Path) -> None:
    for version in (1, 6):
        word = f"has store format version {version}, this engine reads 2, 3, 4, 5"
        refuse_each(shared_store, [changed("version", version)], word=word)


def test_an_unsigned_change_is_refused(store: Path) -> None:
    """Every character of the file counts."""
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
    text = '{"format": "hetero_ee store", "version": 2, "source": ' + '{"a":' * depth + "1" + "}" * depth + "}"
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
    assert "weights.bin is a folder" in refusal(store)


def test_every_bit_flip_is_refused(shared_store: Path) -> None:
    file = shared_store / "manifest.json"
    original = file.read_bytes()
    try:
        for place in range(len(original)):
            flipped = original[place] ^ (1 << place % 8)
            file.write_bytes(original[:place] + bytes([flipped]) + original[place + 1 :])
            assert "manifest" in refusal(shared_store) or "version" in refusal(shared_store)
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
