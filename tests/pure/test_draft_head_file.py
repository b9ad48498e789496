"""Draft heads from disk: what is read, and what is refused with one sentence that says why."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.errors import CheckpointError, HeteroError, ModelError
from hetero_ee.speculation.sources.draft_head_file import draft_head_facts, read_draft_head
from tests.draft_heads import (
    FFN,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    MODEL,
    VOCAB,
    head_tensors,
    head_weights,
    part_of,
    save_head,
)

Change = Callable[[dict[str, Tensor]], Any]
LAYER = "layers.0."


def test_a_published_heads_tensors_are_the_layers(tmp_path: Path) -> None:
    head, expected = read_draft_head(save_head(tmp_path), MODEL), head_weights()
    for name in ("fc", "fc_bias", "qkv", "output", "gate_up", "down", "norm"):
        found, true = part_of(head, name), part_of(expected, name)
        assert found is not None and true is not None and torch.equal(found, true), name
    assert part_of(head, "embedding") is None and head.draft_token_ids is None and part_of(head, "qkv_bias") is None
    assert head.spec.n_layers == 1 and head.spec.ffn_size == FFN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_what_a_head_may_have_beside_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: values.to(dtype) for name, values in head_tensors().items()}
    del tensors["fc.bias"]
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN).to(dtype)
    tensors[LAYER + "self_attn.rotary_emb.inv_freq"] = torch.ones(HEAD_DIM // 2)
    for part, n_rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
        tensors[LAYER + f"self_attn.{part}_proj.bias"] = torch.full((n_rows,), float(ord(part)), dtype=dtype)
    changes = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "draft_token_ids": [0, 7, VOCAB - 1]}
    folder = save_head(tmp_path, tensors, **changes)
    head = read_draft_head(folder, MODEL)
    fc, embedding, qkv_bias = (part_of(head, name) for name in ("fc", "embedding", "qkv_bias"))
    assert part_of(head, "fc_bias") is None and fc is not None and fc.dtype == torch.float32
    assert embedding is not None and embedding.shape == (VOCAB, HIDDEN)
    assert head.draft_token_ids is not None and head.draft_token_ids.tolist() == [0, 7, VOCAB - 1]
    assert qkv_bias is not None and qkv_bias[[0, HIDDEN, -1]].tolist() == list(map(ord, "qkv"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 32000}, ["32000 tokens", f"has {HIDDEN} and {VOCAB}"]),
        ({"hidden_size": 96}, ["hidden size 96", f"has {HIDDEN} and {VOCAB}"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers is 2", "has 1"]),
        ({"mlp_bias": True}, ["not a layer that a draft head can have"]),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ["Qwen3ForCausalLM"]),
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 9}, ["OPTForCausalLM"]),
        ({"hidden_size": "many"}, ["hidden_size", "'many'"]),
    ],
)
def test_a_head_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    folder = save_head(tmp_path, **changes)
    with pytest.raises(HeteroError) as caught:
        read_draft_head(folder, MODEL)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "token_ids",
    [
        [],
        [3, 2],
        [3, 3],
        [-1, 3],
        [3, VOCAB],
        [0, 10**30],
        [1.0, 2.0],
        [True],
        ["3"],
        [[1, 2]],
        [None],
        "0-9",
        7,
        {"0": 1},
        False,
        list(range(100_000)),
        list(range(VOCAB)) * 2,
        "\x1b[31m" * 1000,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_draft_vocabulary_that_makes_no_sense_is_refused(tmp_path: Path, token_ids: Any) -> None:
    folder = save_head(tmp_path, draft_token_ids=token_ids)
    for read in (read_draft_head, draft_head_facts):
        with pytest.raises(ModelError) as caught:
            read(folder, MODEL)
        message = str(caught.value)
        assert "draft_token_ids" in message and f"0 to {VOCAB - 1}" in message
        assert message.isprintable() and len(message) < 500 and message.count(". ") == 0


@pytest.mark.parametrize(("token_ids", "n_tokens"), [(None, VOCAB), ([0, 5], 2), (list(range(VOCAB)), VOCAB)])
def test_the_planner_hears_how_many_tokens_are_drafted(tmp_path: Path, token_ids: Any, n_tokens: int) -> None:
    folder = save_head(tmp_path, draft_token_ids=token_ids)
    assert draft_head_facts(folder, MODEL).n_draft_tokens == n_tokens


def _set(name: str, values: Tensor) -> Change:
    return lambda tensors: tensors.update({name: values})


def _poison(name: str, value: float) -> Change:
    return lambda tensors: tensors[name].view(-1)[3].fill_(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("fc.weight"), ["lacks", "fc.weight"]),
        (_set("fc.weight", torch.zeros(HIDDEN, HIDDEN)), ["fc.weight", f"[{HIDDEN}, {HIDDEN}]", f"{2 * HIDDEN}]"]),
        (_set("embed_tokens.weight", torch.zeros(9, HIDDEN)), ["embed_tokens.weight", "[9, 48]", f"[{VOCAB}, 48]"]),
        (_set("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.int8)), ["fc.weight", "I8"]),
        (_set("lm_head.weight\x1b", torch.zeros(2)), ["lm_head", "does not have"]),
        (_set(LAYER + "input_layernorm.weight", torch.ones(HIDDEN)), ["input_layernorm", "does not have"]),
        (_set("d2t", torch.zeros(2, dtype=torch.int64)), ["EAGLE-3"]),
        (_poison("fc.bias", math.nan), ["fc.bias", "no numbers"]),
        (_poison(LAYER + "mlp.down_proj.weight", math.inf), ["down_proj", "no numbers"]),
        (_set("draft_token_ids", torch.tensor([1, 2])), ["draft_token_ids", "does not have"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Change, words: list[str]) -> None:
    tensors = head_tensors()
    change(tensors)
    with pytest.raises(CheckpointError) as caught:
        read_draft_head(save_head(tmp_path, tensors), MODEL)
    message = str(caught.value)
    assert all(word in message for word in words) and message.isprintable(), message


def test_a_pickle_is_never_opened_and_the_way_out_is_named(tmp_path: Path) -> None:
    save_head(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(tmp_path / "gone off")))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*pickle.*convert_draft_head\.py"):
        read_draft_head(tmp_path, MODEL)
    assert not (tmp_path / "gone off").exists()


@pytest.mark.parametrize("content", [b"", b"junk" * 40, b"\xff" * 8, b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    save_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_draft_head(tmp_path, MODEL)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_draft_head(tmp_path, MODEL)
    save_head(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(HeteroError, match=r"holds no model\.safetensors"):
        read_draft_head(tmp_path, MODEL)


class _Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)
