"""Every field of a GGUF file given values that it can't have: over 200 files, each refused in one typed sentence.

Together with the cases that test_bad_gguf.py and test_gguf_header.py describe one by one, more than 300.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import CheckpointError, HeteroError
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.hub.gguf.header import GgufTensor, read_gguf_header
from tests.e2e.test_bad_gguf import BAD, SIZES, good, metadata, refusal, rewrite
from tests.families import random_model
from tests.gguf_files import described, gguf_bytes
from tests.gguf_models import write_gguf
from tests.pure.test_gguf_header import BAD as BAD_HEADERS

__all__ = ["good"]  # the fixture
gguf = pytest.importorskip("gguf")
NO_COUNT: list[Any] = [0, 2**32 - 1, 2**63, 1.5, math.nan, "1", "", [1.5], [], ["1"]]
NO_FLOAT: list[Any] = [math.nan, math.inf, -math.inf, "1", [1.0, 2.0], []]
NO_ID: list[Any] = [10**6, 2**32 - 1, 2**63, 1.5, math.nan, "1", [1], []]
NO_NAME: list[Any] = [None, 7, 1.5, True, "", "LLAMA", "\x1b[2J", "llama\n", ["llama"], []]
VALUES: dict[str, list[Any]] = {
    "general.architecture": NO_NAME,
    "llama.block_count": [None, *NO_COUNT],
    "llama.embedding_length": [None, *NO_COUNT],
    "llama.feed_forward_length": [None, *NO_COUNT],
    "llama.attention.head_count": [None, *NO_COUNT],
    "llama.attention.head_count_kv": NO_COUNT,
    "llama.context_length": [None, 0, 1.5, math.nan, "1", "", [1.5], []],
    "llama.attention.layer_norm_rms_epsilon": NO_FLOAT,
    "llama.rope.freq_base": NO_FLOAT,
    "llama.rope.dimension_count": [1, 15, 2**63, 1.5, "16", [16]],
    "llama.expert_count": [2, 2**63],
    "llama.rope.scaling.type": [7, "su", "YARN", ["linear"]],
    "tokenizer.ggml.model": [None, 7, "", "rwkv", "t5", ["gpt2"]],
    "tokenizer.ggml.pre": [None, 7, "", "unknown", ["gpt-2"]],
    "tokenizer.ggml.tokens": [None, 7, "a", [1.0], [], ["a"]],
    "tokenizer.ggml.token_type": [7, "1", [1.0], [1], ["1"]],
    "tokenizer.ggml.merges": [7, "a b", [1.0], ["a"], ["a b c"], [""], ["qqqq zzzz"]],
    "tokenizer.ggml.bos_token_id": NO_ID,
    "tokenizer.ggml.eos_token_id": NO_ID,
}
# Of each type, the first bytes of the fp16 numbers of a block.
NUMBERS = {"Q4_0": [0], "Q4_1": [0, 2], "IQ4_NL": [0], "IQ4_XS": [0], "Q4_K": [0, 2], "Q5_0": [0], "Q8_0": [0]}
NUMBERS |= {"Q5_1": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q3_K": [108]}
NOT_FINITE = (0x7C00, 0xFC00, 0x7E00)  # infinity, minus infinity, NaN
N_CUTS = 24


def check(found: HeteroError | None, what: object) -> None:
    """refusal has looked at the sentence."""
    assert found is not None, f"{what!r} was taken"


@pytest.mark.parametrize("key", VALUES)
def test_values_that_a_field_can_not_have(good: Path, tmp_path: Path, key: str) -> None:
    for value in VALUES[key]:
        metadata(**{key.replace(".", "__"): value})(good, tmp_path / "bad.gguf")
        check(refusal(tmp_path / "bad.gguf", tmp_path), value)


def test_an_end_of_a_turn_that_is_no_number_is_passed_over(good: Path, tmp_path: Path) -> None:
    metadata(tokenizer__ggml__eot_token_id=[1])(good, tmp_path / "list.gguf")
    assert refusal(tmp_path / "list.gguf", tmp_path) is None


def spoiled(tensor: GgufTensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Descriptions that contradict the rest of the file, as fields of a description that are another."""
    sizes = list(reversed(tensor.shape))
    if tensor.name != "output.weight":  # else the embedding is the head
        yield "missing", {"name": None}
    yield "renamed", {"name": tensor.name + ".old"}
    yield "another's name", {"name": "output_norm.weight" if len(sizes) > 1 else "token_embd.weight"}
    yield "a row more", {"sizes": [*sizes[:-1], sizes[-1] + 32]}
    yield "a dimension more", {"sizes": [*sizes, 2]}
    yield "of another type", {"kind": gguf.GGMLQuantizationType.Q8_0}


def test_descriptions_that_contradict_the_file(good: Path, tmp_path: Path) -> None:
    header, data = read_gguf_header(good), good.read_bytes()
    for chosen in header.tensors.values():
        for what, changes in spoiled(chosen):
            tensors, body = [], b""
            for tensor in header.tensors.values():
                fields = {"name": tensor.name, "sizes": list(reversed(tensor.shape)), "kind": None}
                fields |= changes if tensor is chosen else {}
                kind = gguf.GGMLQuantizationType[tensor.type.name] if fields["kind"] is None else fields["kind"]
                if fields["name"] is not None:
                    tensors.append(described(fields["name"], fields["sizes"], int(kind), len(body)))
                    body += data[tensor.start : tensor.start + tensor.n_bytes]
                    body += bytes(-len(body) % 32)
            plain = tmp_path / "plain.gguf"
            rewrite(good, plain, dict(header.metadata))
            n_entries = len(header.metadata)
            entries = plain.read_bytes()[24 : header_end(plain)]
            (tmp_path / "bad.gguf").write_bytes(gguf_bytes([entries], tensors, body, n_entries=n_entries))
            check(refusal(tmp_path / "bad.gguf", tmp_path), (chosen.name, what))


def header_end(file: Path) -> int:
    """Where the descriptions of tensors begin."""
    first = next(iter(read_gguf_header(file).tensors.values())).name.encode()
    return file.read_bytes().index(struct.pack("<Q", len(first)) + first)


def test_files_that_end_too_early(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    for part in range(N_CUTS):
        (tmp_path / "bad.gguf").write_bytes(data[: len(data) * part // N_CUTS])
        check(refusal(tmp_path / "bad.gguf", tmp_path), part)


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_blocks_that_are_none(tmp_path: Path, kind: str) -> None:
    """In the first and in the last block of a matrix."""
    from hetero_ee.hub.config_file import read_spec
    from hetero_ee.weights.gguf_checkpoint import open_checkpoint

    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 64}
    write_gguf(
        random_model("llama", **sizes), tmp_path / "good.gguf", lambda name: kind if "ffn_down" in name else "F16"
    )
    data = (tmp_path / "good.gguf").read_bytes()
    tensor = read_gguf_header(tmp_path / "good.gguf").tensors["blk.0.ffn_down.weight"]
    last = tensor.start + tensor.n_bytes - tensor.type.block_bytes
    for place in NUMBERS[kind]:
        for number, start in zip(NOT_FINITE, (tensor.start, last, last), strict=True):
            spoilt = bytearray(data)
            spoilt[start + place : start + place + 2] = struct.pack("<H", number)
            (tmp_path / "bad.gguf").write_bytes(spoilt)
            its = gguf_folder(tmp_path / "bad.gguf", configuration_only=True)
            checkpoint = open_checkpoint(its, read_spec(its))
            with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_down\.weight"):
                checkpoint.tiles("layers.0.ffn.down")
                checkpoint.tensor("layers.0.ffn.down")


def test_there_are_300() -> None:
    n_here = sum(map(len, VALUES.values())) + N_CUTS + 3 * sum(map(len, NUMBERS.values()))
    assert n_here + len(BAD) + len(BAD_HEADERS) >= 300
