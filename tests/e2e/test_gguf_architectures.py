"""GGUF files of further architectures: what plans read of them, what is refused, and llama.cpp on the same files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.config import demo_model_folder
from hetero_ee.errors import HeteroError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.planning.parts import model_parts
from tests.e2e.test_gguf import FAMILIES, IDS, SMALL, assert_same, expected_logits, logits, opened
from tests.families import random_model
from tests.gguf_models import write_gguf

pytest.importorskip("gguf")
KINDS = ["gemma2", "gemma3", "olmo2", "olmo3", "granite", "starcoder2", "stablelm", "glm4", "smollm3"]


def written(name: str, file: Path, kind: str = "F16", **changes: Any) -> Any:
    """The model, whose file has matrices of this type and these metadata."""
    family, sizes = FAMILIES[name]
    model = random_model(family, **(SMALL | sizes))
    write_gguf(model, file, lambda _: kind, **changes)
    return model


def opened_spec(file: Path) -> Any:
    return read_spec(gguf_folder(file, configuration_only=True))


@pytest.mark.parametrize("name", KINDS)
def test_specs_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    """All fields but what a file says otherwise: windows that GGUF leaves out, fp32 numbers."""
    model = written(name, tmp_path / "m.gguf")
    model.config.save_pretrained(tmp_path / "hf")
    ours, theirs = opened_spec(tmp_path / "m.gguf"), read_spec(tmp_path / "hf")
    for field in ("sliding_windows", "tied_head", "head_dim", "n_kv_heads", "qkv_bias", "activation", "norm", "gated"):
        assert getattr(ours, field) == getattr(theirs, field), field
    for field in ("attention_scale", "embedding_scale", "residual_scale", "logit_scale", "logit_cap", "attention_cap"):
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field)), field
    assert ours.layer_ropes == theirs.layer_ropes and ours.rope == theirs.rope


@pytest.mark.parametrize("name", KINDS)
def test_8_bits_are_exact_and_counted_by_plans_from_the_header(tmp_path: Path, name: str) -> None:
    model = written(name, tmp_path / "m.gguf", kind="Q8_0")
    planned = sum(part.weight_bytes for part in model_parts(opened_spec(tmp_path / "m.gguf"), "fp16"))
    spec, weights = opened(tmp_path / "m.gguf", tmp_path)
    assert planned == weights.n_bytes and spec.int8_matrices
    assert_same(logits(spec, weights), expected_logits(model))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "glm4v": ("glm4", {"glm4.rope.dimension_sections": [8, 8, 0, 0]}, "several positions"),
    "glm-ocr": ("glm4", {"glm4.nextn_predict_layers": 1}, "predict further tokens"),
    "nope": ("granite", {"granite.rope.scaling.finetuned": False}, "do not turn"),
    "unscaled": ("granite", {"{arch}.logit_scale": None}, "granite.logit_scale is missing"),
    "pattern": ("gemma2", {"gemma2.attention.sliding_window_pattern": 3}, "expected 2 or a flag"),
    "short-pattern": ("gemma3", {"gemma3.attention.sliding_window_pattern": [True, False]}, "layer_types"),
    "pattern-text": ("olmo3", {"{arch}.attention.sliding_window_pattern": "LLG"}, "expected 4 or a flag"),
    "theta": ("olmo3", {"olmo2.rope.freq_base_swa": 20.0}, "freq_base_swa"),
    "eps": ("stablelm", {"{arch}.attention.layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
    "cap": ("gemma2", {"{arch}.final_logit_softcapping": "x"}, "final_logit_softcapping"),
    "factors": ("smollm3", {"factors": {"rope_freqs.weight": np.ones(8, dtype=np.float32)}}, "rope_freqs.weight"),
    "part": ("olmo2", {"olmo2.rope.dimension_count": 8}, "turn, expected all"),
    "qk-norm": ("stablelm", {"factors": {"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}}, "qk_layernorm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(tmp_path: Path, name: str) -> None:
    family, changes, words = REFUSED[name]
    written(family, tmp_path / "m.gguf", **changes)
    with pytest.raises(HeteroError) as caught:
        opened_spec(tmp_path / "m.gguf")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_layers_with_a_window_as_flags_or_by_default(tmp_path: Path) -> None:
    written("gemma3", tmp_path / "a.gguf", **{"gemma3.attention.sliding_window_pattern": [True, False] * 3 + [True]})
    assert opened_spec(tmp_path / "a.gguf").sliding_windows == (7, None) * 3 + (7,)
    written("gemma3", tmp_path / "b.gguf", **{"{arch}.attention.sliding_window": None})
    spec = opened_spec(tmp_path / "b.gguf")
    assert set(spec.sliding_windows) == {None} and {rope.theta for rope in spec.layer_ropes} == {1e6}
    names = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    keys = {f"{{arch}}.{'attention.' if name == 'sliding_window' else ''}{name}": None for name in names}
    written("gemma2", tmp_path / "c.gguf", **keys)  # files of June 2024
    spec = opened_spec(tmp_path / "c.gguf")
    assert (spec.sliding_windows[:2], spec.attention_cap, spec.logit_cap) == ((4096, None), 50.0, 30.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_llama_cpp_computes_the_same_of_these_files(tmp_path: Path, name: str) -> None:
    """That the tests' writer puts rows, norms and metadata where llama.cpp looks for them."""
    llama_cpp = pytest.importorskip("llama_cpp")
    family, sizes = FAMILIES[name]
    vocab_size = read_spec(demo_model_folder()).vocab_size
    model = random_model(family, **(SMALL | sizes | {"vocab_size": vocab_size}))
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F32", tokenizer=demo_model_folder())
    options = {"n_ctx": 64, "n_threads": 1, "type_k": 0, "type_v": 0, "swa_full": True}
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), logits_all=True, verbose=False, **options)
    theirs.eval(IDS)
    found, expected = torch.tensor(np.array(theirs.scores[: len(IDS)])), expected_logits(model)
    # llama.cpp looks up GELU in a table of fp16.
    most = 3e-3 if name in ("gemma2", "gemma3", "starcoder2") else 1e-5
    assert (found - expected).abs().max() < most * expected.abs().max()
