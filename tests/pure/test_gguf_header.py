"""GGUF headers: a good one is read, every bad one refused in one sentence, before anything is allocated by it."""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.gguf.header import MAX_TENSORS, read_gguf_header
from hetero_ee.hub.gguf.tensor_types import TENSOR_TYPES
from tests.gguf_files import F16, F32, Q4_0, described, entry, gguf_bytes, text

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": ("u32", 1),
    "llama.rope.freq_base": ("f32", 500.0),
    "tokenizer.ggml.tokens": ["<s>", "a", "ä"],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.5],
    "tokenizer.ggml.add_bos_token": ("bool", True),
}
TENSORS = (
    described("token_embd.weight", (32, 3), Q4_0, 0),
    described("output_norm.weight", (4,), F32, 64),
    described("output.weight", (2, 3, 2), F16, 96),
)
DATA = bytes(96 + 24)
GOOD = gguf_bytes(METADATA, TENSORS, DATA)
MOST_BYTES = 48 * 2**20  # of memory for a file of a few hundred bytes: the longest text that one may ask for, and half


def one(kind: bytes) -> bytes:
    """A file with one metadata entry, of this type and value."""
    return gguf_bytes([entry("k", kind)], [])


def placed(*tensors: bytes) -> bytes:
    return gguf_bytes(METADATA, tensors, DATA)


HUGE = 2**63
BAD = {
    "empty": (b"", "is empty"),
    "no magic": (b"GGML" + GOOD[4:], "does not begin with GGUF"),
    "a zip": (b"PK\x03\x04" + bytes(99), "zip archive"),
    "a web page": (b"<html>" + bytes(99), "web page"),
    "magic alone": (b"GGUF", "leads beyond byte 4"),
    "version 0": (gguf_bytes({}, [], version=0), "version 0"),
    "version 1": (gguf_bytes({}, [], version=1), "version 1"),
    "version 4": (gguf_bytes({}, [], version=4), "version 4"),
    "big-endian": (gguf_bytes({}, [], version=3 << 24), "big-endian"),
    "tensors 2^63": (gguf_bytes({}, [], n_tensors=HUGE), "tensors, expected at most"),
    "tensors beyond ours": (gguf_bytes({}, [], n_tensors=MAX_TENSORS + 1), "tensors, expected at most"),
    "tensors not there": (gguf_bytes({}, [], n_tensors=MAX_TENSORS), "leads beyond"),
    "entries 2^64": (gguf_bytes({}, [], n_entries=2**64 - 1), "metadata entries, expected"),
    "entries not there": (gguf_bytes({}, [], n_entries=9), "leads beyond"),
    "key of 2^64 bytes": (gguf_bytes([text(b"k", 2**64 - 1)], []), "bytes in a key, expected"),
    "key of 2^31 bytes": (gguf_bytes([text(b"k", 2**31)], []), "bytes in a key, expected"),
    "key twice": (gguf_bytes([entry("k", "a"), entry("k", "b")], []), "key 'k' appears twice"),
    "key not UTF-8": (gguf_bytes([entry(b"\xff", "a")], []), "a key is not UTF-8"),
    "text of 2^63 bytes": (one(struct.pack("<I", 8) + text(b"v", HUGE)), "bytes in 'k', expected"),
    "text of 2^24 bytes": (one(struct.pack("<I", 8) + text(b"v", 2**24)), "leads beyond"),
    "text not UTF-8": (one(struct.pack("<I", 8) + text(b"\xc3\x28")), "'k' is not UTF-8"),
    "type 13": (one(struct.pack("<IQ", 13, 0)), "type 13, which is unknown"),
    "type 2^32": (one(struct.pack("<IQ", 2**32 - 1, 0)), "which is unknown"),
    "array of 2^63": (one(struct.pack("<IIQ", 9, 0, HUGE)), "values in 'k', expected"),
    "array of 2^21": (one(struct.pack("<IIQ", 9, 12, 2**21)), "leads beyond"),
    "array of texts not there": (one(struct.pack("<IIQ", 9, 8, 2**21)), "leads beyond"),
    "array of arrays": (one(struct.pack("<IIQIQ", 9, 9, 1, 4, 0)), "type 9, which is unknown"),
    "array of type 99": (one(struct.pack("<IIQ", 9, 99, 0)), "which is unknown"),
    "arrays beyond ours": (one(struct.pack("<IIQ", 9, 0, 5 * 10**6)), "values in 'k', expected"),
    "alignment 0": (gguf_bytes({"general.alignment": ("u32", 0)}, []), "general.alignment is 0"),
    "alignment 33": (gguf_bytes({"general.alignment": ("u32", 33)}, []), "general.alignment is 33"),
    "alignment 2^31": (gguf_bytes({"general.alignment": ("u32", 2**31)}, []), "general.alignment"),
    "alignment a text": (gguf_bytes({"general.alignment": "32"}, []), "general.alignment is '32'"),
    "alignment true": (gguf_bytes({"general.alignment": ("bool", True)}, []), "general.alignment is True"),
    "no dimensions": (placed(described("t", (), F32, 0)), "0 dimensions"),
    "dimensions 2^32": (placed(described("t", (1,), F32, 0, 2**32 - 1)), "dimensions, expected"),
    "five dimensions": (placed(described("t", (1,) * 5, F32, 0)), "5 dimensions"),
    "size 0": (placed(described("t", (0, 4), F32, 0)), "are 0"),
    "0 hides an overflow": (placed(described("t", (2**62, 2**62, 0), F32, 0)), "are 0 or beyond"),
    "size 2^63": (placed(described("t", (HUGE,), F32, 0)), "beyond memory"),
    "product 2^64": (placed(described("t", (2**32, 2**32), F32, 0)), "beyond memory"),
    "product wraps to 4": (placed(described("t", (2**33 + 2, 2**31), F32, 0)), "beyond memory"),
    "type unknown": (placed(described("t", (4,), 999, 0)), "type 999, which is unknown"),
    "type removed": (placed(described("t", (32,), 4, 0)), "type 4, which is unknown"),
    "row not whole": (placed(described("t", (48, 2), Q4_0, 0)), "multiple of Q4_0's 32"),
    "offset unaligned": (placed(described("t", (4,), F32, 8)), "multiple of 32"),
    "offset 2^64 - 32": (placed(described("t", (4,), F32, 2**64 - 32)), "part of the file is missing"),
    "beyond the end": (placed(described("t", (4,), F32, 128)), "part of the file is missing"),
    "larger than the file": (placed(described("t", (1024, 1024), F32, 0)), "part of the file is missing"),
    "overlap": (placed(described("t", (16,), F32, 0), described("u", (4,), F32, 32)), "overlaps the one before"),
    "name twice": (placed(described("t", (4,), F32, 0), described("t", (4,), F32, 32)), "'t' appears twice"),
    "name too long": (placed(described("t" * 513, (4,), F32, 0)), "bytes in a tensor's name"),
    "name not UTF-8": (placed(described(b"\x80", (4,), F32, 0)), "is not UTF-8"),
}


def test_a_good_header_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GOOD)
    header = read_gguf_header(tmp_path / "m.gguf")
    assert header.metadata["tokenizer.ggml.tokens"] == ["<s>", "a", "ä"]
    assert header.metadata["tokenizer.ggml.scores"] == [0.0, -1.0, -2.5]
    assert header.metadata["llama.block_count"] == 1 and header.metadata["tokenizer.ggml.add_bos_token"] is True
    with pytest.raises(ModelError, match="expected one for each layer"):
        header.each("rope.freq_base", 2**62)
    first = len(GOOD) - len(DATA)
    found = [(t.name, t.type.name, t.shape, t.start - first, t.n_bytes) for t in header.tensors.values()]
    assert found == [
        ("token_embd.weight", "Q4_0", (3, 32), 0, 54),
        ("output_norm.weight", "F32", (4,), 64, 16),
        ("output.weight", "F16", (2, 3, 2), 96, 24),
    ]


@pytest.mark.parametrize("case", BAD)
def test_bad_headers_are_refused(tmp_path: Path, case: str) -> None:
    data, words = BAD[case]
    message = refusal(tmp_path / "m.gguf", data)
    assert message is not None and words in message, message


def test_every_beginning_of_a_good_file_is_refused(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        assert refusal(tmp_path / "m.gguf", GOOD[:length]) is not None, length


def test_flipped_bytes_are_refused_or_read(tmp_path: Path) -> None:
    assert 0 < flip_bytes(tmp_path, range(1500)) < 1500


@pytest.mark.slow
def test_more_flipped_bytes(tmp_path: Path) -> None:
    flip_bytes(tmp_path, range(1500, 1_000_000))


def test_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for number, found in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (found.name, found.block_weights, found.block_bytes)


def flip_bytes(folder: Path, seeds: range) -> int:
    """How many of the files were refused: of each, some bytes of the header are drawn anew, or some are left out."""
    n_refused = 0
    for seed in seeds:
        rng, data = random.Random(seed), bytearray(GOOD)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data[rng.randrange(len(GOOD) - len(DATA))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.1:
            at = rng.randrange(len(data))
            del data[at : at + rng.randrange(1, 16)]
        n_refused += refusal(folder / "m.gguf", bytes(data)) is not None
    return n_refused


def refusal(file: Path, data: bytes) -> str | None:
    """The sentence that refuses a file, None where it is read; whatever else is raised, or large, fails."""
    file.write_bytes(data)
    tracemalloc.start()
    try:
        read_gguf_header(file)
    except CheckpointError as error:
        message = str(error)
        assert message.isprintable() and message.endswith(".") and len(message) < 500 and str(file) in message
        return message
    finally:
        most_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most_bytes < MOST_BYTES, most_bytes
    return None
