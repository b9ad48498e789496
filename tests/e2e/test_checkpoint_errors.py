"""Checkpoints: damaged, unsafe or unfitting ones are refused in one sentence; the many good forms load alike."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero_ee.errors import CheckpointError, ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.model_files import MAX_INDEX_BYTES
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from tests.families import edit_config, random_model, save_checkpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN, UP, NORM, HEAD = (
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = random_model("llama", num_hidden_layers=1)
    return model, save_checkpoint(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama: tuple[Any, Path], tmp_path: Path) -> Path:
    """A good checkpoint to spoil."""
    return Path(shutil.copytree(llama[1], tmp_path / "model"))


def load(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by this engine's names."""
    weights = load_dense(Checkpoint(folder, read_spec(folder)))
    return {name: weight.dequantize() for name, weight in weights.matrices.items()} | weights.vectors


def refusal(folder: Path) -> str:
    """The one sentence with which the checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    sentence = str(caught.value)
    assert sentence.isprintable() and sentence.endswith(".") and str(folder) in sentence
    assert len(sentence) < 800 + 2 * len(str(folder))
    return sentence


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in one.items())


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the tensors of a single-file checkpoint."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def shard(folder: Path) -> dict[str, str]:
    """Splits the single file in two shards with an index. Returns tensor name -> shard."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / SINGLE).unlink()
    write_index(folder, files)
    return files


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


# --- files missing, damaged, unsafe


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_spec(tmp_path)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert "holds no weights" in refusal(folder)
    (folder / SINGLE).mkdir()
    assert "is a folder, expected a regular file" in refusal(folder)


def header_bytes(file: Path) -> int:
    """Bytes before the first tensor."""
    return 8 + int(struct.unpack("<Q", file.read_bytes()[:8])[0])


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_a_truncated_file_is_refused_by_name(folder: Path, sharded: bool) -> None:
    file = folder / (sorted(set(shard(folder).values()))[1] if sharded else SINGLE)
    whole, header = file.read_bytes(), header_bytes(file)
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert file.name in refusal(folder), length
    file.write_bytes(whole + b"\0")
    assert file.name in refusal(folder)


def safetensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GARBAGE = {
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "zeros": bytes(100),
    "html": b"<!DOCTYPE html><html>",
    "header of 2^63 bytes": safetensors_file({}, length=2**63),
    "header of 101 MB": safetensors_file({}, length=101_000_000),
    "header beyond the end": safetensors_file({}, length=3),
    "no JSON": safetensors_file(b"{]"),
    "not UTF-8": safetensors_file(b'{"\xff": 1}'),
    "a list": safetensors_file([]),
    "deep": safetensors_file(b'{"a":' * 20_000),
    "unknown type": safetensors_file({"a": TENSOR | {"dtype": "F31"}}, bytes(8)),
    "negative shape": safetensors_file({"a": TENSOR | {"shape": [-2]}}, bytes(8)),
    "shape against size": safetensors_file({"a": TENSOR | {"shape": [3]}}, bytes(8)),
    "shape overflows": safetensors_file({"a": TENSOR | {"shape": [2**33, 2**33]}}, bytes(8)),
    "beyond the end": safetensors_file({"a": TENSOR | {"data_offsets": [8, 16]}}, bytes(8)),
    "overlap": safetensors_file({"a": TENSOR, "b": TENSOR}, bytes(8)),
    "hole": safetensors_file({"a": TENSOR, "b": TENSOR | {"data_offsets": [16, 24]}}, bytes(24)),
    "terminal commands": safetensors_file({"\x1b[2J\n": TENSOR | {"data_offsets": [8, 16]}}, bytes(8)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / SINGLE).write_bytes(GARBAGE[name])
    assert SINGLE in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_advice_and_never_opened(folder: Path, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "was-opened"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    data = pickle.dumps(Bomb())
    pickle.loads(data)  # noqa: S301 - the bomb is live
    assert trace.exists()
    trace.unlink()
    (folder / name).write_bytes(data)
    good = load(folder)  # beside safetensors it is not looked at
    (folder / SINGLE).unlink()
    sentence = refusal(folder)
    assert name in sentence and "pickle" in sentence and "save_pretrained" in sentence
    (folder / SINGLE).write_bytes(data)
    assert SINGLE in refusal(folder)
    assert good and not trace.exists()


# --- the index


OUTSIDE = [
    "../x.safetensors",
    "/x.safetensors",
    "a/x.safetensors",
    "./x.safetensors",
    "..",
    "",
    "x.bin",
    7,
    None,
    ["x"],
]


@pytest.mark.parametrize("name", OUTSIDE, ids=str)
def test_an_index_names_files_beside_it(folder: Path, name: Any) -> None:
    """What it names outside is refused even where it exists and fits."""
    files = shard(folder)
    stray = folder.parent / "x.safetensors"
    first = files[DOWN]
    (folder / first).rename(stray)
    target = str(stray) if name == "/x.safetensors" else name
    write_index(folder, {tensor: target if file == first else file for tensor, file in files.items()})
    sentence = refusal(folder)
    assert INDEX in sentence and "in the same folder" in sentence


ODD = ["nul\0.safetensors", "\x1b[2J.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors"]


@pytest.mark.parametrize("name", ODD, ids=["nul", "escape", "surrogate", "long"])
def test_odd_file_names_in_an_index_are_refused(folder: Path, name: str) -> None:
    write_index(folder, dict.fromkeys(shard(folder), name))
    assert "in the same folder" in refusal(folder)


INDICES = {
    "empty": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"weight_map": {"a": "\xff.safetensors"}}',
    "a list": b"[]",
    "no map": b'{"metadata": {}}',
    "map of pairs": b'{"weight_map": [["a", "b.safetensors"]]}',
    "empty map": b'{"weight_map": {}}',
    "null": b'{"weight_map": null}',
    "deep": b'{"weight_map": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("name", INDICES)
def test_a_malformed_index_is_refused(folder: Path, name: str) -> None:
    shard(folder)
    (folder / INDEX).write_bytes(INDICES[name])
    assert INDEX in refusal(folder)


def test_a_huge_index_is_refused_unread(folder: Path) -> None:
    shard(folder)
    with (folder / INDEX).open("ab") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    assert str(MAX_INDEX_BYTES + 1) in refusal(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    names = sorted(set(shard(folder).values()))
    (folder / names[1]).unlink()
    assert names[1] in refusal(folder) and names[0] not in refusal(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, second = sorted(set(shard(folder).values()))
    tensors = load_file(folder / first)
    name = next(iter(tensors))
    save_file(load_file(folder / second) | {name: tensors[name] + 1}, folder / second)
    sentence = refusal(folder)
    assert name in sentence and first in sentence and second in sentence


# --- tensors


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_missing_and_surplus_tensors_are_named(folder: Path, sharded: bool) -> None:
    edit(folder, lambda tensors: tensors.pop(DOWN))
    if sharded:
        shard(folder)
    sentence = refusal(folder)
    assert f"lacks tensors: {DOWN}." in sentence


def test_a_surplus_tensor_is_named(folder: Path) -> None:
    extra = "model.layers.0.mlp.gate_proj.lora_A"
    edit(folder, lambda tensors: tensors.update({extra: torch.zeros(2), "\x1b[2J": torch.zeros(2)}))
    sentence = refusal(folder)
    assert extra in sentence and "LlamaForCausalLM does not have" in sentence and "\\x1b[2J" in sentence


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (DOWN, torch.zeros(76, 48), "is [76, 48], expected [48, 76]"),
        (DOWN, torch.zeros(48 * 76), "is [3648], expected [48, 76]"),
        (NORM, torch.zeros(1, 48), "is [1, 48], expected [48]"),
        (NORM, torch.zeros(()), "is [], expected [48]"),
        (HEAD, torch.zeros(130, 48), "is [130, 48], expected [131, 48]"),
        (HEAD, torch.zeros(0, 48), "is [0, 48], expected [131, 48]"),
        (DOWN, torch.zeros(48, 76, dtype=torch.int8), "has type I8"),
        (NORM, torch.zeros(48, dtype=torch.int64), "has type I64"),
        (NORM, torch.zeros(48, dtype=torch.bool), "has type BOOL"),
        (DOWN, torch.zeros(48, 76).to(torch.float8_e4m3fn), "has type F8_E4M3"),
    ],
)
def test_wrong_shapes_and_types_are_named(folder: Path, name: str, values: Tensor, words: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: values}))
    assert f"{name} {words}" in refusal(folder)


def test_of_many_differences_five_are_listed(folder: Path) -> None:
    names = [f"surplus.{i}" for i in range(8)]
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(1) for name in names}))
    sentence = refusal(folder)
    assert [name in sentence for name in names] == [True] * 5 + [False] * 3 and "and 3 more" in sentence
    edit(folder, lambda tensors: [tensors.pop(name) for name in names])
    edit_config(folder, hidden_size=64)
    assert "more." in refusal(folder) and refusal(folder).count("expected") == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "index"), [(DOWN, (47, 75)), (UP, (3, 0)), (NORM, (11,)), (HEAD, (130, 1))])
def test_values_that_are_no_numbers_are_named_with_their_place(
    folder: Path, name: str, index: tuple[int, ...], dtype: torch.dtype, value: float
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name][index] = value

    edit(folder, change)
    assert f"tensor {name} holds {value} at {list(index)}" in refusal(folder)


def test_a_double_beyond_fp32_is_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({NORM: torch.full((48,), 1e300, dtype=torch.float64)}))
    assert f"tensor {NORM} holds inf at [0]" in refusal(folder)


def test_the_first_of_several_places_is_named_beyond_the_first_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Values are looked at in chunks; the index counts from the tensor's beginning."""
    monkeypatch.setattr("hetero_ee.weights.checkpoint.CHECK_ELEMENTS", 100)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN][7, 5] = tensors[DOWN][7, 6] = tensors[DOWN][40, 0] = float("nan")

    edit(folder, change)
    assert "at [7, 5]" in refusal(folder)


# --- good ones


def test_a_sharded_checkpoint_loads_like_a_single_file(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, single = llama
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / SINGLE).exists()
    assert same(load(tmp_path), load(single))


def test_of_a_single_file_and_an_index_the_single_file_counts(folder: Path) -> None:
    """transformers does the same, and one model must not be two."""
    from transformers import AutoModelForCausalLM

    single = (folder / SINGLE).read_bytes()
    expected = load(folder)
    edit(folder, lambda tensors: tensors[NORM].add_(1))
    shard(folder)
    (folder / SINGLE).write_bytes(single)
    assert same(load(folder), expected)
    norm = AutoModelForCausalLM.from_pretrained(folder).model.norm.weight
    assert torch.equal(norm, expected["final_norm.norm"])


def test_a_tied_head_may_be_saved_too(tmp_path: Path) -> None:
    folder = save_checkpoint(random_model("llama-tied", num_hidden_layers=1), tmp_path)
    expected = load(folder)
    edit(folder, lambda tensors: tensors.update({HEAD: tensors["model.embed_tokens.weight"].clone()}))
    assert same(load(folder), expected) and "head.tokens" not in expected


@pytest.mark.parametrize("family", ["llama-tied", "opt"])
def test_a_tied_head_may_be_saved_alone(family: str, tmp_path: Path) -> None:
    """transformers takes it for the embedding too."""
    from transformers import AutoModelForCausalLM

    folder = save_checkpoint(random_model(family, num_hidden_layers=1), tmp_path)
    expected = load(folder)
    embedding = "model.decoder.embed_tokens.weight" if family == "opt" else "model.embed_tokens.weight"
    edit(folder, lambda tensors: tensors.update({HEAD: tensors.pop(embedding)}))
    assert same(load(folder), expected)
    theirs = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert torch.equal(theirs, expected["embedding.tokens"])


def test_a_tied_model_without_embedding_and_head_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(random_model("llama-tied", num_hidden_layers=1), tmp_path)
    edit(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "lacks tensors: model.embed_tokens.weight" in refusal(folder)


def test_a_head_alone_is_not_enough_where_nothing_is_tied(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "lacks tensors: model.embed_tokens.weight" in refusal(folder)


def test_an_untied_head_must_be_there(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop(HEAD))
    assert HEAD in refusal(folder)


def test_leftover_rotary_buffers_are_ignored(folder: Path) -> None:
    expected = load(folder)
    leftovers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for i in (0, 1)}
    edit(folder, lambda tensors: tensors.update(leftovers))
    assert same(load(folder), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_float_types_load_as_fp32(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({name: values.to(dtype) for name, values in tensors.items()}))
    expected = load_file(folder / SINGLE)
    loaded = load(folder)
    assert all(values.dtype == torch.float32 for values in loaded.values())
    assert torch.equal(loaded["layers.0.ffn.down"], expected[DOWN].float())
    assert torch.equal(loaded["layers.0.ffn.gate_up"][76:], expected[UP].float())


def test_parts_are_stacked_in_order(folder: Path) -> None:
    tensors, loaded = load_file(folder / SINGLE), load(folder)
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(loaded["layers.0.attention.qkv"], torch.cat(parts))
