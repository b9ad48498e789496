"""Checkpoints whose files are whole and whose tensors, shards or index are wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_ee.errors import CheckpointError, ModelError
from tests.bad_models import (
    CONFIG,
    INDEX,
    SINGLE,
    Bad,
    Spoil,
    also,
    check_refusal,
    content,
    edit_header,
    edit_json,
    safetensors,
    sparse,
)

NORM, DOWN, HEAD = "model.norm.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"
EMBEDDING, KEYS = "model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    """Changes the tensors and writes a good file with them."""

    def write(folder: Path) -> None:
        values = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
        change(values)
        save_file(values, folder / SINGLE)

    return write


def replaced(name: str, tensor: Tensor) -> Spoil:
    return tensors(lambda values: values.update({name: tensor}))


def holding(name: str, place: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> Spoil:
    """One value of a tensor that is no number."""

    def change(values: dict[str, Tensor]) -> None:
        values[name] = values[name].to(dtype)
        values[name][place] = value

    return tensors(change)


def cut(n_bytes: int) -> Spoil:
    """The file's end is missing, or there is more of it."""

    def truncate(folder: Path) -> None:
        with (folder / SINGLE).open("r+b") as file:
            file.truncate((folder / SINGLE).stat().st_size + n_bytes)

    return truncate


def sharded(folder: Path) -> None:
    """Splits the good file in two, with an index."""
    values = load_file(folder / SINGLE)
    files = {name: (FIRST, SECOND)[i % 2] for i, name in enumerate(sorted(values))}
    for file in (FIRST, SECOND):
        save_file({name: tensor for name, tensor in values.items() if files[name] == file}, folder / file)
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))


def index_naming(name: Any) -> Spoil:
    """An index that has this in place of the second file's name."""

    def change(index: dict[str, Any]) -> None:
        index["weight_map"] = {t: name if file == SECOND else file for t, file in index["weight_map"].items()}

    return also(sharded, edit_json(INDEX, change))


def doubled(folder: Path) -> None:
    """One tensor in both shards."""
    sharded(folder)
    first, second = load_file(folder / FIRST), load_file(folder / SECOND)
    name = min(first)
    save_file(second | {name: first[name]}, folder / SECOND)


def without(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink() for name in names]


def half(folder: Path) -> None:
    """A download that ended early: the length of the file is right, the rest is zeros."""
    size, data = (folder / SINGLE).stat().st_size, (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: size // 2].rstrip(b"}") + bytes(size - size // 2))


def moved_header(folder: Path) -> None:
    """The header of another model before these tensors."""
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + data)


TENSORS: dict[str, tuple[Spoil, str]] = {
    "cut by a byte": (cut(-1), "end at byte"),
    "cut by half": (lambda folder: cut(-(folder / SINGLE).stat().st_size // 2)(folder), "end at byte"),
    "a byte more": (cut(1), "end at byte"),
    "a gigabyte of nothing behind": (cut(2**30), "end at byte"),
    "another model's header": (moved_header, "end at byte 8"),
    "one lost": (tensors(lambda values: values.pop(DOWN)), f"lacks tensors: {DOWN}"),
    "all lost": (tensors(lambda values: values.clear()), "lacks tensors"),
    "a layer lost": (edit_json(CONFIG, lambda config: config.update(num_hidden_layers=4)), "lacks tensors"),
    "a layer too many": (edit_json(CONFIG, lambda config: config.update(num_hidden_layers=2)), "does not have"),
    "999 layers promised": (edit_json(CONFIG, lambda config: config.update(num_hidden_layers=999)), "more."),
    "one too many": (replaced("model.layers.0.mlp.down_proj.lora_A", torch.zeros(2)), "does not have"),
    "one with a name that rings": (replaced("\x07\x1b[31m", torch.zeros(2)), "\\x07\\x1b[31m"),
    "renamed": (edit_header(lambda header: header.update({"model.norm.wait": header.pop(NORM)})), "lacks tensors"),
    "hidden size of 4095": (edit_json(CONFIG, lambda c: c.update(hidden_size=4095, head_dim=8)), "and 25 more"),
    "vocabulary of 2^24": (edit_json(CONFIG, lambda c: c.update(vocab_size=2**24)), "expected [16777216, 48]"),
    "FFN of 2^24": (edit_json(CONFIG, lambda c: c.update(intermediate_size=2**24)), "expected [16777216, 48]"),
    "heads of 2^24": (edit_json(CONFIG, lambda c: c.update(head_dim=2**24)), "expected [100663296, 48]"),
    "2^24 heads": (
        edit_json(CONFIG, lambda c: c.update(num_attention_heads=2**24, num_key_value_heads=2**24, head_dim=2)),
        "expected [33554432, 48]",
    ),
    "half the key heads": (edit_json(CONFIG, lambda c: c.update(num_key_value_heads=1)), "k_proj.weight is [16, 48]"),
    "head tied and other": (edit_json(CONFIG, lambda c: c.update(tie_word_embeddings=True)), "to use both"),
    "biases promised": (edit_json(CONFIG, lambda c: c.update(attention_bias=True)), "bias"),
    "transposed": (tensors(lambda v: v.update({DOWN: v[DOWN].T.contiguous()})), "is [76, 48], expected [48, 76]"),
    "flat": (tensors(lambda v: v.update({DOWN: v[DOWN].flatten()})), "is [3648], expected [48, 76]"),
    "no dimension": (replaced(NORM, torch.zeros(())), "is [], expected [48]"),
    "empty": (replaced(NORM, torch.zeros(0)), "is [0], expected [48]"),
    "empty matrix": (replaced(HEAD, torch.zeros(0, 48)), "is [0, 48], expected"),
    "a column less": (replaced(DOWN, torch.zeros(48, 75)), "is [48, 75], expected [48, 76]"),
    "8-bit integers": (replaced(DOWN, torch.zeros(48, 76, dtype=torch.int8)), "type I8"),
    "64-bit integers": (replaced(NORM, torch.zeros(48, dtype=torch.int64)), "type I64"),
    "booleans": (replaced(NORM, torch.zeros(48, dtype=torch.bool)), "type BOOL"),
    "8-bit floats": (replaced(DOWN, torch.zeros(48, 76).to(torch.float8_e5m2)), "type F8_E5M2"),
    "complex numbers": (replaced(NORM, torch.zeros(48, dtype=torch.complex64)), "type C64"),
    "NaN": (holding(DOWN, (47, 75), float("nan")), "nan at [47, 75]"),
    "NaN in a norm": (holding(NORM, (0,), float("nan")), "nan at [0]"),
    "NaN in the embedding": (holding(EMBEDDING, (3, 1), float("nan"), torch.bfloat16), "nan at [3, 1]"),
    "infinity": (holding(KEYS, (0, 0), float("inf"), torch.float16), "inf at [0, 0]"),
    "minus infinity": (holding(HEAD, (1, 2), float("-inf")), "-inf at [1, 2]"),
    "a double beyond fp32": (replaced(NORM, torch.full((48,), 1e300, dtype=torch.float64)), "inf at [0]"),
}
INDICES: dict[str, tuple[Spoil, str]] = {
    "no weights": (without(SINGLE), "holds no weights"),
    "a shard missing": (also(sharded, without(SECOND)), f"lacks weight files named in its index: {SECOND}"),
    "both shards missing": (also(sharded, without(FIRST, SECOND)), FIRST),
    "a shard empty": (also(sharded, content(SECOND, b"")), f"{SECOND} is empty"),
    "a shard cut": (also(sharded, lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-1])), SECOND),
    "a shard a pointer": (also(sharded, content(SECOND, b"version https://git-lfs.github.com/spec/v1\n")), "git lfs"),
    "a tensor in both shards": (doubled, f"is in both {FIRST} and {SECOND}"),
    "one shard twice": (also(sharded, lambda f: shutil.copy(f / FIRST, f / SECOND)), "is in both"),
    "a shard the index knows nothing of": (index_naming(FIRST), "lacks tensors"),
    "index empty": (also(sharded, content(INDEX, b"")), "is empty"),
    "index cut": (also(sharded, content(INDEX, b'{"weight_map": {')), "not valid JSON"),
    "index not UTF-8": (also(sharded, content(INDEX, b'{"weight_map": {"a": "\xff"}}')), "not valid JSON"),
    "index with a null for a map": (also(sharded, content(INDEX, b'{"weight_map": null}')), "no weight_map object"),
    "index a list": (also(sharded, content(INDEX, b"[]")), "no weight_map object"),
    "index without a map": (also(sharded, content(INDEX, b'{"metadata": {}}')), "no weight_map object"),
    "index with an empty map": (also(sharded, content(INDEX, b'{"weight_map": {}}')), "no weight_map object"),
    "index with a list for a map": (also(sharded, content(INDEX, b'{"weight_map": [1]}')), "no weight_map object"),
    "index in UTF-16": (also(sharded, content(INDEX, '{"weight_map": {}}'.encode("utf-16"))), "UTF-16"),
    "index a web page": (also(sharded, content(INDEX, b"<html>")), "web page"),
    "index nested": (also(sharded, content(INDEX, b'{"weight_map": ' + b"[" * 100_000)), "nested too deeply"),
    "index of 33 MB": (also(sharded, sparse(INDEX, 33 * 2**20)), "an index has at most"),
    "index of a million objects": (also(sharded, content(INDEX, b"[" + b"{}," * 10**6 + b"{}]")), "at most"),
    "index of a terabyte": (also(sharded, sparse(INDEX, 2**40)), "an index has at most"),
}
NAMES = {
    "parent": "../x.safetensors",
    "absolute": "/etc/x.safetensors",
    "folder": "a/x.safetensors",
    "here": "./x.safetensors",
    "drive": "C:\\x.safetensors",
    "backslash": "..\\x.safetensors",
    "share": "\\\\host\\x.safetensors",
    "percent": "%2e%2e%2fx.safetensors",
    "stream": "x.safetensors:y.safetensors",
    "device": "CON.safetensors",
    "small device": "com1.safetensors",
    "hidden": ".x.safetensors",
    "trailing dot": "x.safetensors.",
    "trailing space": "x.safetensors ",
    "option": "-x.safetensors",
    "tilde": "~x.safetensors",
    "NUL": "x\0.safetensors",
    "line end": "x\n.safetensors",
    "behind a line end": "x.safetensors\n",
    "escape": "\x1b[2J.safetensors",
    "right to left": "x\u202e.safetensors",
    "letters that look alike": "m\u043edel.safetensors",
    "half a character": "\ud800.safetensors",
    "4 kB": "x" * 4096 + ".safetensors",
    "only the ending": ".safetensors",
    "other ending": "pytorch_model.bin",
    "no ending": "x",
    "empty": "",
    "dots": "..",
    "number": 7,
    "null": None,
    "list": ["x.safetensors"],
    "object": {"name": "x.safetensors"},
}
FOLDERS: dict[str, Bad] = {
    "empty folder": (lambda f: [file.unlink() for file in f.iterdir()], ModelError, "config.json is missing"),
    "adapter alone": (
        lambda f: [
            (f / CONFIG).rename(f / "adapter_config.json"),
            (f / SINGLE).rename(f / "adapter_model.safetensors"),
        ],
        ModelError,
        "merge it into its base model",
    ),
    "only as pickles": (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), CheckpointError, "pickle"),
    "shards without their index": (also(sharded, without(INDEX)), CheckpointError, "holds no weights"),
    "weights under another name": (
        lambda f: (f / SINGLE).rename(f / "weights.safetensors"),
        CheckpointError,
        "holds no weights",
    ),
    "no tokenizer": (without("tokenizer.json"), ModelError, "has no tokenizer"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors_are_refused(own_tiny: Path, cache: Path, name: str) -> None:
    spoil, words = TENSORS[name]
    spoil(own_tiny)
    check_refusal(own_tiny, cache, CheckpointError, words)


@pytest.mark.parametrize("name", INDICES)
def test_a_wrong_index_is_refused(own_tiny: Path, cache: Path, name: str) -> None:
    spoil, words = INDICES[name]
    spoil(own_tiny)
    check_refusal(own_tiny, cache, CheckpointError, words)


@pytest.mark.parametrize("name", NAMES)
def test_an_index_names_plain_files(own_tiny: Path, cache: Path, name: str) -> None:
    index_naming(NAMES[name])(own_tiny)
    check_refusal(own_tiny, cache, CheckpointError, "expected a .safetensors file in the same folder")


@pytest.mark.parametrize("name", FOLDERS)
def test_an_unfit_folder_is_refused(own_tiny: Path, cache: Path, name: str) -> None:
    spoil, error, words = FOLDERS[name]
    spoil(own_tiny)
    check_refusal(own_tiny, cache, error, words)
