"""Safetensors headers by the hundred thousand: each is refused by a typed error, or is what the library reads too."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors

from hetero_ee.errors import CheckpointError
from hetero_ee.weights.safetensors_file import StoredTensor, header_tensors, read_header
from tests.fuzz.mutation import change_text, mutated

HEADERS: tuple[dict[str, Any], ...] = (
    {
        "__metadata__": {"format": "pt"},
        "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "lm_head.weight": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [16, 40]},
        "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [40, 40]},
        "one": {"dtype": "U8", "shape": [], "data_offsets": [40, 41]},
    },
    {"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}},
    {f"t{i}": {"dtype": "F16", "shape": [2, 1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(3)},
    {},
)
SIZES = (41, 2, 12, 0)  # bytes of tensors behind each
# What the library accepts and we refuse: names that are there twice, blanks in front, what is beyond our limits, and
# fields it ignores, whatever is in them.
STRICTER = (
    "appears twice",
    "is not a size",
    "is not described by",
    "not a JSON object",
    "not an object of strings",
    "characters, expected 1 to",
    "expected up to 8 sizes",
)
FILE_SHARE = 50  # one input in so many goes through a file


def check_header(header: bytes, n_data_bytes: int) -> bool:
    """Whether the header is accepted. Anything but a plain refusal, or a header the library reads alike, fails."""
    file = struct.pack("<Q", len(header)) + header + bytes(n_data_bytes)
    try:
        tensors = header_tensors(header, n_data_bytes)
    except ValueError as error:
        assert str(error).isprintable() and len(str(error)) < 500
        assert not _library_reads(file) or any(words in str(error) for words in STRICTER), str(error)
        return False
    assert _as_the_library(tensors) == _library_reads(file)
    json.loads(header, object_pairs_hook=check_pairs)
    return True


def check_pairs(pairs: list[tuple[str, Any]]) -> None:
    """No name may be there twice: which one counts depends on the reader."""
    assert len({name for name, _ in pairs}) == len(pairs)


def check_file(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    try:
        read_header(file)
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 500 and str(file) in str(error)


def fuzz(seeds: range, folder: Path) -> int:
    """How many of the inputs were good ones."""
    n_accepted = 0
    for seed in seeds:
        rng = random.Random(seed)
        which = rng.randrange(len(HEADERS))
        header = mutated(HEADERS[which], rng)
        n_data_bytes = SIZES[which] + (rng.choice((-1, 1, 8)) if rng.random() < 0.05 else 0)
        try:
            n_accepted += check_header(header, max(0, n_data_bytes))
            if seed % FILE_SHARE == 0:
                data = struct.pack("<Q", len(header)) + header + bytes(max(0, n_data_bytes))
                check_file(folder / "x.safetensors", change_text(data, rng) if rng.random() < 0.7 else data)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {header!r}, {n_data_bytes} bytes of tensors: {error!r}") from error
    return n_accepted


def _as_the_library(tensors: dict[str, StoredTensor]) -> list[tuple[str, str, list[int], int]]:
    return sorted((name, t.dtype, list(t.shape), t.end - t.start) for name, t in tensors.items())


def _library_reads(file: bytes) -> list[tuple[str, str, list[int], int]] | None:
    """Name, type, shape and size of each tensor; None where the library refuses the file."""
    try:
        found = safetensors.deserialize(file)
    except safetensors.SafetensorError:
        return None
    return sorted((name, t["dtype"], list(t["shape"]), len(t["data"])) for name, t in found)


def test_good_headers_are_accepted() -> None:
    for header, n_bytes in zip(HEADERS, SIZES, strict=True):
        assert check_header(json.dumps(header).encode(), n_bytes)


def test_every_type_is_the_librarys() -> None:
    from hetero_ee.weights.safetensors_file import BITS

    for dtype, bits in BITS.items():
        header = {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}
        assert check_header(json.dumps(header).encode(), bits), dtype


def test_two_thousand_headers(memory_folder: Path) -> None:
    assert 50 < fuzz(range(2_000), memory_folder) < 1_000


@pytest.mark.slow
def test_a_million_headers(memory_folder: Path) -> None:
    assert fuzz(range(10**6), memory_folder) > 25_000


@pytest.mark.parametrize("n_bytes", [0x180, 0x13C], ids=["pickle", "web page"])
def test_a_header_whose_length_looks_like_another_file_is_cut_short(tmp_path: Path, n_bytes: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", n_bytes) + b"{")
    with pytest.raises(CheckpointError, match=f"its header of {n_bytes} bytes is cut short"):
        read_header(tmp_path / "model.safetensors")
