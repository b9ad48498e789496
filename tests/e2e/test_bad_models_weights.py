"""Weight files that are damaged, hostile or something else: each is refused in one sentence before it is used."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import CheckpointError
from tests.bad_models import SINGLE, check_refusal, safetensors

GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 497774208\n"
PAGE = b"<!DOCTYPE html>\n<html><body>503 Service Unavailable</body></html>"
TENSOR: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def one(**changes: Any) -> bytes:
    """A file of one tensor of 8 bytes."""
    return safetensors({"a": TENSOR | changes}, bytes(8))


def pair(first: list[int], second: list[int], n_bytes: int = 16) -> bytes:
    return safetensors({"a": TENSOR | {"data_offsets": first}, "b": TENSOR | {"data_offsets": second}}, bytes(n_bytes))


def numbered(count: int, places: str = "data_offsets") -> bytes:
    """Many empty tensors."""
    rows = (f'"t{i}":{{"dtype":"F32","shape":[0],"{places}":[0,0]}}' for i in range(count))
    return safetensors(("{" + ",".join(rows) + "}").encode())


def text_header(text: str, data: bytes = bytes(8)) -> bytes:
    return safetensors(text.encode(), data)


FILES: dict[str, tuple[bytes, str]] = {
    "0 bytes": (b"", "is empty"),
    "1 byte": (b"\x01", "it has 1 bytes"),
    "7 bytes": (b"\x02" * 7, "it has 7 bytes"),
    "8 bytes": (safetensors(b""), "its header is empty"),
    "16 zeros": (bytes(16), "begins with zeros"),
    "a megabyte of zeros": (bytes(2**20), "unfinished download"),
    "length beyond the end by one": (safetensors({}, length=3), "cut short"),
    "length 101 MB": (safetensors({}, length=101_000_000), "would have 101000000 bytes"),
    "length 2^63": (safetensors({}, length=2**63), "would have 9223372036854775808 bytes"),
    "length 2^64 - 1": (safetensors({}, length=2**64 - 1), "would have 18446744073709551615 bytes"),
    "length one too small": (safetensors({"a": TENSOR}, bytes(8), 56), "Expecting"),
    "length one too large": (safetensors({"a": TENSOR}, bytes(8), 58), "Expecting"),
    "no tensors": (safetensors({}), "lacks tensors"),
    "Git LFS pointer": (GIT_LFS, "git lfs pull"),
    "web page": (PAGE, "web page"),
    "page behind line ends": (b"\r\n\r\n" + PAGE, "web page"),
    "GGUF": (b"GGUF" + bytes(100), "GGUF file"),
    "torch zip": (b"PK\x03\x04" + bytes(100), "never opened"),
    "pickle": (pickle.dumps({"a": list(range(100))}), "pickle"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
    "gzip": (b"\x1f\x8b\x08" + b"\xff" * 100, "compressed"),
    "text": (b"see the README for the weights\n", "damaged or not a safetensors file"),
    "header null": (safetensors(b"null"), "not a JSON object"),
    "header list": (safetensors([TENSOR]), "not a JSON object"),
    "header number": (safetensors(b"7"), "not a JSON object"),
    "header behind a space": (safetensors(b' {"a":1}'), "not a JSON object"),
    "header in UTF-16": (safetensors(json.dumps({"a": TENSOR}).encode("utf-16"), bytes(8)), "not a JSON object"),
    "header behind a byte order mark": (safetensors(b"\xef\xbb\xbf{}"), "not a JSON object"),
    "header not UTF-8": (safetensors(b'{"\xff": 1}'), "can't decode"),
    "header of bare text": (safetensors(b"{]"), "damaged"),
    "header twice": (safetensors(b"{}{}"), "Extra data"),
    "header padded with zeros": (safetensors(b"{}\0\0"), "Extra data"),
    "line end in a name": (safetensors(b'{"a\nb": 1}'), "control character"),
    "deep lists": (safetensors(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "deep objects": (safetensors(b'{"a":' * 20_000), "nested too deeply"),
    "name twice": (text_header(f'{{"a":{json.dumps(TENSOR)},"a":{json.dumps(TENSOR)}}}'), "'a' appears twice"),
    "name twice, once escaped": (
        text_header(f'{{"a":{json.dumps(TENSOR)},"\\u0061":{json.dumps(TENSOR)}}}'),
        "'a' appears twice",
    ),
    "field twice": (
        text_header('{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        "appears twice",
    ),
    "metadata twice": (text_header('{"__metadata__":{},"__metadata__":{}}', b""), "appears twice"),
    "metadata a list": (safetensors({"__metadata__": []}), "not an object of strings"),
    "metadata null": (safetensors({"__metadata__": None}), "not an object of strings"),
    "metadata of numbers": (safetensors({"__metadata__": {"a": 1}}), "not an object of strings"),
    "metadata nested": (safetensors({"__metadata__": {"a": {}}}), "not an object of strings"),
    "metadata of half a character": (safetensors({"__metadata__": {"a": "\ud800"}}), "surrogates not allowed"),
    "name of half a character": (safetensors({"\ud800": TENSOR}, bytes(8)), "surrogates not allowed"),
    "name empty": (safetensors({"": TENSOR}, bytes(8)), "0 characters"),
    "name of 513 characters": (safetensors({"n" * 513: TENSOR}, bytes(8)), "513 characters"),
    "name of 4 MB": (safetensors({"n" * 4_000_000: TENSOR}, bytes(8)), "4000000 characters"),
    "name that clears the screen": (safetensors({"\x1b[2J\n": TENSOR | {"shape": 7}}, bytes(8)), "\\x1b[2J\\n"),
    "tensor null": (safetensors({"a": None}), "is not described"),
    "tensor a list": (safetensors({"a": [1]}), "is not described"),
    "no dtype": (safetensors({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "is not described"),
    "no shape": (safetensors({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "is not described"),
    "no place": (safetensors({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "is not described"),
    "a field too many": (one(strides=[1]), "is not described"),
    "type unknown": (one(dtype="F31"), "type 'F31', which is unknown"),
    "type in small letters": (one(dtype="f32"), "which is unknown"),
    "type a number": (one(dtype=32), "type 32, which is unknown"),
    "type a list": (one(dtype=["F32"]), "which is unknown"),
    "type of 60 bits": (one(dtype="F6_E2M3"), "needs 1.5 bytes"),
    "half a byte": (one(dtype="F4", shape=[15]), "needs 7.5 bytes"),
    "shape negative": (one(shape=[-2]), "-2 is not a size"),
    "shape minus zero": (text_header('{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,8]}}'), "-0 is not a size"),
    "shape a fraction": (one(shape=[2.0]), "2.0 is not a size"),
    "shape with an exponent": (text_header('{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}'), "not a size"),
    "shape NaN": (one(shape=[float("nan")]), "NaN is not a size"),
    "shape infinite": (one(shape=[float("inf")]), "Infinity is not a size"),
    "shape true": (one(shape=[True, 2]), "shape [True, 2]"),
    "shape a string": (one(shape=["2"]), "shape ['2']"),
    "shape null": (one(shape=None), "shape None"),
    "shape an object": (one(shape={"0": 2}), "shape {'0': 2}"),
    "shape nested": (one(shape=[[2]]), "shape [[2]]"),
    "shape against size": (one(shape=[3]), "needs 12 bytes"),
    "shape of no dimension against size": (one(shape=[]), "needs 4 bytes"),
    "shape of 9 dimensions": (one(shape=[2] + [1] * 8), "expected up to 8 sizes"),
    "shape of a million dimensions": (one(shape=[1] * 1_000_000), "expected up to 8 sizes"),
    "shape overflows": (one(shape=[2**33, 2**33]), "more than memory can hold"),
    "shape wraps to its size": (one(shape=[2**62, 2**2, 2]), "more than memory can hold"),
    "overflow hidden by a zero": (one(shape=[2**40, 2**40, 0], data_offsets=[0, 0]), "more than memory can hold"),
    "size of 2^63": (one(shape=[2**63]), "expected up to 8 sizes"),
    "size of 20 digits": (one(shape=[10**19]), "expected up to 8 sizes"),
    "size of 5000 digits": (text_header('{"a":{"dtype":"F32","shape":[' + "9" * 5000 + "]}}"), "limit (4300 digits)"),
    "place negative": (one(data_offsets=[-8, 0]), "-8 is not a size"),
    "place backwards": (one(data_offsets=[8, 0]), "is at [8, 0]"),
    "place of one number": (one(data_offsets=[8]), "is at [8]"),
    "place of three numbers": (one(data_offsets=[0, 8, 16]), "is at [0, 8, 16]"),
    "place a string": (one(data_offsets="08"), "is at '08'"),
    "place null": (one(data_offsets=None), "is at None"),
    "place of 2^62": (one(data_offsets=[2**62, 2**62 + 8]), "after a gap at 0"),
    "beyond the end": (one(data_offsets=[8, 16]), "after a gap at 0"),
    "end beyond the file": (safetensors({"a": TENSOR}, bytes(7)), "end at byte 8 of 7"),
    "end before the file's": (safetensors({"a": TENSOR}, bytes(9)), "end at byte 8 of 9"),
    "same place twice": (pair([0, 8], [0, 8]), "overlaps the one before"),
    "overlap of a byte": (pair([0, 8], [7, 15], 15), "overlaps the one before"),
    "hole of a byte": (pair([0, 8], [9, 17], 17), "after a gap at 8"),
    "hole in front": (pair([1, 9], [9, 17], 17), "after a gap at 0"),
    "one inside the other": (pair([0, 8], [4, 12], 12), "overlaps the one before"),
    "200,001 tensors": (numbered(200_001), "more than 200000 tensors"),
    "200,001 tensors, escaped": (numbered(200_001, "data_\\u006fffsets"), "more than 200000 tensors"),
    "a million small objects": (safetensors(b'{"a":[' + b'{"a":0},' * 1_200_000 + b"0]}"), "values, expected at most"),
    "five million lists": (safetensors(b'{"a":[' + b"[]," * 5_000_000 + b"0]}"), "values, expected at most"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_weight_file_is_refused(own_tiny: Path, cache: Path, name: str) -> None:
    data, words = FILES[name]
    (own_tiny / SINGLE).write_bytes(data)
    check_refusal(own_tiny, cache, CheckpointError, words)
