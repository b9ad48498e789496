"""Models in several GGUF files: any part opens all; parts that don't belong together are refused in one sentence."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.gguf.header import GgufHeader
from hetero_ee.hub.gguf.parts import base_name, part_files, read_model_header
from tests.gguf_files import F32, described, gguf_bytes

NAMES = ("token_embd.weight", "blk.0.attn_norm.weight", "output_norm.weight")


def name(number: int, n_parts: int = 3) -> str:
    return f"m-{number:05}-of-{n_parts:05}.gguf"


def write_part(file: Path, index: int, *tensors: str, **changes: Any) -> None:
    """As gguf-split writes it; changes: of `count`, `no` and `tensors`, None leaves one out."""
    said = {"no": ("u32", index), "count": ("u32", 3), "tensors": ("i32", 3)} | changes
    keys = {"no": "split.no", "count": "split.count", "tensors": "split.tensors.count"}
    metadata = {keys[key]: value for key, value in said.items() if value is not None}
    own = {"general.architecture": "llama"} if index == 0 else {}
    laid = [described(each, (8,), F32, 32 * place) for place, each in enumerate(tensors)]
    file.write_bytes(gguf_bytes(own | metadata, laid, bytes(32 * len(tensors))))


def write_all(folder: Path) -> list[Path]:
    files = [folder / name(index + 1) for index in range(3)]
    for index, file in enumerate(files):
        write_part(file, index, NAMES[index])
    return files


def opened(file: Path) -> GgufHeader:
    return read_model_header(part_files(file))


@pytest.mark.parametrize("given", [1, 2, 3])
def test_any_part_opens_all(tmp_path: Path, given: int) -> None:
    files = write_all(tmp_path)
    header = opened(tmp_path / name(given))
    assert {tensor.name: tensor.file for tensor in header.tensors.values()} == dict(zip(NAMES, files, strict=True))
    assert header.file == files[0] and header.metadata["general.architecture"] == "llama"
    assert base_name(header.file) == "m"


def test_a_first_part_may_have_metadata_alone(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    write_part(files[0], 0)
    write_part(files[1], 1, *NAMES[:2])
    assert set(opened(files[0]).tensors) == set(NAMES)


def test_links_as_a_download_cache_has_them(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for index, file in enumerate(write_all(tmp_path)):
        file.rename(tmp_path / "blobs" / f"{index}abc")
        file.symlink_to(tmp_path / "blobs" / f"{index}abc")
    (tmp_path / "link.gguf").symlink_to(tmp_path / name(2))
    assert set(opened(tmp_path / name(2)).tensors) == set(NAMES)
    with pytest.raises(CheckpointError, match="not named so"):
        opened(tmp_path / "link.gguf")


def test_a_whole_file_may_say_that_it_is_one_part(tmp_path: Path) -> None:
    for file, count in ((tmp_path / "m.gguf", ("u32", 0)), (tmp_path / name(1, 1), ("u32", 1))):
        write_part(file, 0, *NAMES, count=count, no=None)
        assert set(opened(file).tensors) == set(NAMES)


def changed(number: int, *tensors: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: write_part(folder / name(number), number - 1, *(tensors or (NAMES[number - 1],)), **changes)


BAD: dict[str, tuple[Callable[[Path], object], int, str]] = {  # and which file the sentence names
    "the first is missing": (lambda folder: (folder / name(1)).unlink(), 1, "is missing, part 1 of 3"),
    "the last is missing": (lambda folder: (folder / name(3)).unlink(), 3, "is missing, part 3 of 3"),
    "a folder as a part": (
        lambda folder: ((folder / name(3)).unlink(), (folder / name(3)).mkdir()),
        3,
        "is a folder, expected",
    ),
    "a link to elsewhere": (
        lambda folder: ((folder / name(3)).unlink(), (folder / name(3)).symlink_to("/etc/hostname")),
        3,
        "link",
    ),
    "a part is empty": (lambda folder: (folder / name(3)).write_bytes(b""), 3, "is empty"),
    "a part is truncated": (
        lambda folder: (folder / name(3)).write_bytes((folder / name(3)).read_bytes()[:-1]),
        3,
        "part of the file is missing",
    ),
    "another count": (changed(2, count=("u32", 4)), 2, "one of 3 parts, but claims 4"),
    "count as a text": (changed(2, count="3"), 2, "claims '3'"),
    "no count": (changed(1, count=None), 1, "claims 0"),
    "another number": (changed(2, no=("u32", 2)), 2, "has part number 2, expected 1"),
    "no number": (changed(3, no=None), 3, "has part number 0, expected 2"),
    "one part twice": (lambda folder: shutil.copy(folder / name(2), folder / name(3)), 3, "has part number 1"),
    "a tensor twice": (changed(3, NAMES[0]), 3, "has tensor 'token_embd.weight', which"),
    "a tensor too few": (changed(3, tensors=("i32", 4)), 3, "claims 4 tensors in all parts, but they have 3"),
    "a tensor too many": (changed(3, "a", "b"), 1, "claims 3 tensors in all parts, but they have 4"),
    "tensors as a text": (changed(2, tensors="3"), 2, "claims '3' tensors in all parts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sets_are_refused(tmp_path: Path, case: str) -> None:
    break_one, number, words = BAD[case]
    write_all(tmp_path)
    break_one(tmp_path)
    assert_refused(tmp_path / name(2), tmp_path / name(number), words)


@pytest.mark.parametrize("file", [name(0), name(4), name(1, 0), name(1, 99999)])
def test_bad_numbers_in_names_are_refused(tmp_path: Path, file: str) -> None:
    write_part(tmp_path / file, 0)
    assert_refused(tmp_path / file, tmp_path / file, "expected 1 to 512 parts")


def test_a_part_of_another_name_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path / "m.gguf", 0, *NAMES)
    assert_refused(tmp_path / "m.gguf", tmp_path / "m.gguf", "one of 3 parts of a model, but not named so")


def assert_refused(file: Path, named: Path, words: str) -> None:
    with pytest.raises(CheckpointError) as found:
        opened(file)
    message = str(found.value)
    assert message.startswith(f"{named} ") and words in message, message
    assert message.isprintable() and message.endswith(".")
