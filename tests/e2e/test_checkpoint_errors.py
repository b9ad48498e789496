"""Checkpoints that are cut off, unsafe or unfitting are refused in one sentence; the many good forms load alike.

Cases that need no more than one file's content are in test_bad_models_weights.py and test_bad_models_tensors.py.
"""

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

from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_spec
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


@pytest.mark.parametrize("is_absolute", [False, True])
def test_an_index_names_files_beside_it(folder: Path, is_absolute: bool) -> None:
    """What it names outside is refused even where it exists and fits."""
    files = shard(folder)
    stray = folder.parent / "x.safetensors"
    first = files[DOWN]
    (folder / first).rename(stray)
    target = str(stray) if is_absolute else "../x.safetensors"
    write_index(folder, {tensor: target if file == first else file for tensor, file in files.items()})
    sentence = refusal(folder)
    assert INDEX in sentence and "in the same folder" in sentence


# --- tensors


def test_of_many_differences_five_are_listed(folder: Path) -> None:
    names = [f"surplus.{i}" for i in range(8)]
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(1) for name in names}))
    sentence = refusal(folder)
    assert [name in sentence for name in names] == [True] * 5 + [False] * 3 and "and 3 more" in sentence
    edit(folder, lambda tensors: [tensors.pop(name) for name in names])
    edit_config(folder, hidden_size=64)
    assert "more." in refusal(folder) and refusal(folder).count("expected") == 5


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
