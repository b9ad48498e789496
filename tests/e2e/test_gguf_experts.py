"""GGUF files with mixtures of experts: codes that are kept, gate and up in one tensor, and files that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.errors import CheckpointError, HeteroError
from hetero_ee.hub.gguf import header as gguf_header
from hetero_ee.hub.gguf.config import hf_config, hf_generation_config
from hetero_ee.hub.gguf.header import GgufHeader, read_gguf_header
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.planning.parts import model_parts
from hetero_ee.weights.store.import_report import imported_types
from hetero_ee.weights.store.manifest import read_manifest
from tests.e2e.test_gguf import FAMILIES, SMALL, assert_same, expected_logits, logits, opened
from tests.e2e.test_gguf_architectures import opened_spec
from tests.families import random_model
from tests.gguf_models import write_gguf

pytest.importorskip("gguf")
NAMES = ("qwen3-moe", "qwen3.5-moe", "gpt-oss")
KEPT = {"Q4_0": "int4", "Q4_1": "int4 zeros", "MXFP4": "int4", "IQ4_NL": "int4", "Q8_0": "int8", "Q5_0": "int5"}


def model_of(name: str) -> Any:
    family, sizes = FAMILIES[name]
    return random_model(family, **(SMALL | sizes))


def experts_only(kind: str) -> Any:
    return lambda name: kind if "_exps" in name else "F32"


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_codes_of_experts_are_kept(tmp_path: Path, name: str, kind: str) -> None:
    model, file = model_of(name), tmp_path / "m.gguf"
    write_gguf(model, file, experts_only(kind))
    planned = model_parts(opened_spec(file), "fp16")
    spec, weights = opened(file, tmp_path)
    _, dense = opened(file, tmp_path, "none")
    for short in ("gate_up", "down"):
        found = weights.matrices[f"layers.1.moe.{short}"]
        expected = dense.matrices[f"layers.1.moe.{short}"].dequantize()
        assert found.layout == KEPT[kind]
        error = (found.dequantize() - expected).square().sum() / expected.square().sum()
        assert error < 1e-7 if kind == "Q4_1" else error == 0
    rows = {row.types: row for row in imported_types(read_manifest(tmp_path / "store-None").source)}
    assert rows[kind].is_exact == (kind != "Q4_1")
    if kind in ("Q4_0", "Q8_0"):
        assert planned == model_parts(spec, "fp16")


@pytest.mark.parametrize(("kind", "layout"), [("Q4_K", "int4 zeros"), ("Q6_K", "int6")])
@pytest.mark.parametrize("name", ["glm4-flash", "qwen3-next"])
def test_k_types_of_experts_are_kept(tmp_path: Path, name: str, kind: str, layout: str) -> None:
    family, sizes = FAMILIES[name]
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 32}
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if name == "qwen3-next" else {}
    model = random_model(family, **(SMALL | sizes | wide | kinds))
    write_gguf(model, tmp_path / "m.gguf", experts_only(kind))
    _, weights = opened(tmp_path / "m.gguf", tmp_path)
    _, dense = opened(tmp_path / "m.gguf", tmp_path, "none")
    for short in ("gate_up", "down"):
        found = weights.matrices[f"layers.1.moe.{short}"]
        expected = dense.matrices[f"layers.1.moe.{short}"].dequantize()
        assert found.layout == layout
        assert (found.dequantize() - expected).square().sum() < 1e-6 * expected.square().sum()


def test_experts_with_parts_of_two_types_get_8_bits(tmp_path: Path) -> None:
    model, file = model_of("gpt-oss"), tmp_path / "m.gguf"
    write_gguf(model, file, lambda name: "Q8_0" if "up_exps" in name else "MXFP4" if "_exps" in name else "F32")
    _, weights = opened(file, tmp_path)
    assert weights.matrices["layers.0.moe.gate_up"].layout == "int8"
    assert weights.matrices["layers.0.moe.down"].layout == "int4"
    _, dense = opened(file, tmp_path, "none")
    for name in ("layers.2.moe.gate_up", "layers.2.moe.down"):
        assert torch.equal(weights.matrices[name].dequantize(), dense.matrices[name].dequantize())


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5-moe", "gemma4-moe", "deepseek3"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_gate_and_up_of_all_experts_may_be_one_tensor(tmp_path: Path, name: str, kind: str) -> None:
    model, file = model_of(name), tmp_path / "m.gguf"
    write_gguf(model, file, lambda _: kind, is_fused=True)
    assert "blk.1.ffn_gate_up_exps.weight" in read_gguf_header(file).tensors
    assert_same(logits(*opened(file, tmp_path, "none")), expected_logits(model))
    if kind == "Q8_0":
        assert_same(logits(*opened(file, tmp_path)), expected_logits(model))


def test_a_single_expert_may_be_stored_without_its_dimension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's tools write it."""
    family, sizes = FAMILIES["qwen3-moe"]
    model = random_model(family, **(SMALL | sizes | {"num_experts": 1, "num_experts_per_tok": 1}))
    plain = gguf_header.GgufTensor

    def without(*arguments: Any, **named: Any) -> Any:
        made = plain(*arguments, **named)
        return replace(made, shape=made.shape[1:]) if made.shape[0] == 1 and len(made.shape) == 3 else made

    monkeypatch.setattr(gguf_header, "GgufTensor", without)
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F16")
    assert len(read_gguf_header(tmp_path / "m.gguf").tensors["blk.0.ffn_up_exps.weight"].shape) == 2
    assert_same(logits(*opened(tmp_path / "m.gguf", tmp_path, "none")), expected_logits(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"{arch}.expert_count": 6}, "blk.0.ffn_gate_inp.weight is"),
        ({"{arch}.expert_count": None}, "num_experts is missing|holds tensors"),
        ({"{arch}.expert_used_count": 9}, "num_experts_per_tok is 9"),
        ({"{arch}.expert_feed_forward_length": 48}, "ffn_gate_exps.weight is"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_gguf(model_of("qwen3-moe"), tmp_path / "m.gguf", lambda _: "F16", **changes)
    with pytest.raises(HeteroError, match=message):
        opened(tmp_path / "m.gguf", tmp_path, "none")


def test_other_architectures_with_experts_are_refused(tmp_path: Path) -> None:
    write_gguf(random_model("llama", **SMALL), tmp_path / "m.gguf", lambda _: "F16", **{"llama.expert_count": 8})
    with pytest.raises(HeteroError, match="a mixture of 8 experts"):
        hf_config(read_gguf_header(tmp_path / "m.gguf"))


def test_a_file_that_ends_within_its_experts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(model_of("gpt-oss"), file, experts_only("MXFP4"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises((CheckpointError, HeteroError), match="get the file again"):
        opened(file, tmp_path, "none")


@pytest.mark.parametrize("name", NAMES)
def test_specs_have_the_experts_of_the_original(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F16")
    ours = opened_spec(tmp_path / "m.gguf")
    theirs = spec_from_hf(model.config.to_dict() | {"architectures": model.config.architectures}, "config")
    for layer in range(ours.n_layers):
        assert ours.layer(layer).ffn == theirs.layer(layer).ffn


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a", "<|end|>", "<|endoftext|>"], [1, 2]),
        (["a", "<|end|>", "<|call|>"], [1]),
        (["<|return|>", "<|end|>", "<|endoftext|>", "<|call|>"], [0, 3]),
    ],
)
def test_a_message_of_gpt_oss_ends_between_its_channels(texts: list[str], expected: list[int]) -> None:
    """It writes <|end|> after its thoughts, and its answer follows, even if the file calls it the end of a turn."""
    metadata = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.eot_token_id": 1}
    header = GgufHeader(Path("m.gguf"), metadata, {})
    assert hf_generation_config(header)["eos_token_id"] == expected
