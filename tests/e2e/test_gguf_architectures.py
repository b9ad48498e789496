"""GGUF files of further architectures: what plans read of them, what is refused, and llama.cpp on the same files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.config import demo_model_folder
from hetero_ee.errors import HeteroError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.config import hf_config
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.hub.gguf.header import read_gguf_header
from hetero_ee.hub.gguf.tokenizer import SPLITTINGS
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.planning.parts import model_parts
from hetero_ee.text.tokenizer import Tokenizer
from tests.e2e.test_gguf import FAMILIES, IDS, LONG, PLAIN_ROPE, SMALL, assert_same, expected_logits, logits, opened
from tests.families import YARN_ROPE, random_model
from tests.gguf_models import write_gguf

pytest.importorskip("gguf")
KINDS = ["gemma2", "gemma3", "olmo2", "olmo3", "granite", "starcoder2", "stablelm", "glm4", "smollm3"]
KINDS += ["qwen3.5", "qwen3-moe", "qwen3.5-moe", "gpt-oss", "lfm2", "gemma", "seed_oss", "ernie4_5", "gemma4"]
KINDS += ["ministral3", "qwen3-next", "glm4-flash", "deepseek2", "deepseek3", "glm4.5", "granite-hybrid"]


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
    assert planned == weights.n_bytes and spec.matrix_layouts
    assert_same(logits(spec, weights), expected_logits(model))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no-layers": (
        "gemma4",
        {"gemma4.block_count": 0, "{arch}.attention.sliding_window_pattern": []},
        "no flag for each layer",
    ),
    "glm4v": ("glm4", {"glm4.rope.dimension_sections": [8, 8, 0, 0]}, "several positions"),
    "glm-ocr": ("glm4", {"glm4.nextn_predict_layers": 1}, "predict further tokens"),
    "glm4.5v": ("glm4.5", {"glm4moe.rope.dimension_sections": [8, 8, 0, 0]}, "several positions"),
    "softmax": ("glm4.5", {"{arch}.expert_gating_func": 1}, "expert_gating_func is 1, expected 2"),
    "of-chosen": ("deepseek3", {"{arch}.expert_gating_func": 3}, "unlike DeepSeek's"),
    "growing": ("deepseek3", {"deepseek2.attention.temperature_scale": 0.1}, "unlike DeepSeek's"),
    "key": (
        "deepseek3",
        {"{arch}.attention.key_length_mla": None, "{arch}.attention.key_length": None},
        "of a key's None",
    ),
    "groups": ("deepseek3", {"{arch}.expert_group_used_count": 5}, "n_group is 4 and topk_group 5, which do not fit 8"),
    "nope": ("granite", {"granite.rope.scaling.finetuned": False}, "do not rotate"),
    "unscaled": ("granite", {"{arch}.logit_scale": None}, "granite.logit_scale is missing"),
    "pattern": ("gemma2", {"gemma2.attention.sliding_window_pattern": 3}, "expected 2 or a flag"),
    "short-pattern": ("gemma3", {"gemma3.attention.sliding_window_pattern": [True, False]}, "layer_types"),
    "pattern-text": ("olmo3", {"{arch}.attention.sliding_window_pattern": "LLG"}, "expected 4 or a flag"),
    "theta": ("olmo3", {"olmo2.rope.freq_base_swa": 20.0}, "freq_base_swa"),
    "eps": ("stablelm", {"{arch}.attention.layer_norm_epsilon": None}, "layer_norm_epsilon is missing"),
    "cap": ("gemma2", {"{arch}.final_logit_softcapping": "x"}, "final_logit_softcapping"),
    "factors": ("smollm3", {"factors": {"rope_freqs.weight": np.ones(8, dtype=np.float32)}}, "rope_freqs.weight"),
    "part": ("olmo2", {"olmo2.rope.dimension_count": 8}, "rotate, expected all"),
    "qk-norm": ("stablelm", {"factors": {"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}}, "qk_layernorm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(tmp_path: Path, name: str) -> None:
    family, changes, words = REFUSED[name]
    written(family, tmp_path / "m.gguf", **changes)
    with pytest.raises(HeteroError) as caught:
        opened_spec(tmp_path / "m.gguf")
    assert words in str(caught.value) and "\n" not in str(caught.value)


ODD_VALUES = [None, "x", True, -1, 0, 2**63, math.nan, math.inf, 1e-45, [], [1, 2], ["x"], [False] * 3, [1.5] * 3]


@pytest.mark.parametrize("name", KINDS)
def test_odd_values_end_in_a_sentence_or_are_read(tmp_path: Path, name: str) -> None:
    written(name, tmp_path / "m.gguf")
    header = read_gguf_header(tmp_path / "m.gguf")
    arch = header.metadata["general.architecture"]
    n_refused = 0
    for key in {*header.metadata, *(f"{arch}.{key}" for key in ODD_KEYS)} - {"general.architecture"}:
        for value in ODD_VALUES:
            changed = {each: old for each, old in header.metadata.items() if each != key}
            odd: dict[str, Any] = changed | ({} if value is None else {key: value})
            try:
                spec_from_hf(hf_config(replace(header, metadata=odd)), "m.gguf")
            except HeteroError as error:
                assert "\n" not in str(error)
                n_refused += 1
    assert n_refused > 50


ODD_KEYS = ["rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "attention.scale"]
ODD_KEYS += ["attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping", "expert_count"]


OLD_SIZES = {
    "{arch}.attention.head_count_kv": 4,
    "{arch}.attention.key_length": 48,
    "{arch}.attention.value_length": 32,
}
OLD_SIZES |= {"{arch}.attention.key_length_mla": None, "{arch}.attention.value_length_mla": None}
OLD_SIZES |= {"{arch}.expert_gating_func": None}


@pytest.mark.parametrize(("name", "changes"), [("qwen3-next", {}), ("deepseek2", OLD_SIZES), ("deepseek3", OLD_SIZES)])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_older_files_have_one_tensor_of_what_newer_ones_split(
    tmp_path: Path, name: str, changes: dict[str, Any], kind: str
) -> None:
    """Files of Qwen3-Next before 2026, and of DeepSeek before May 2025, whose key_up is requantized to 8 bits."""
    model = written(name, tmp_path / "m.gguf", kind, is_old=True, **changes)
    names = read_gguf_header(tmp_path / "m.gguf").tensors
    assert "blk.0.ssm_in.weight" in names or "blk.0.attn_kv_b.weight" in names
    planned = sum(part.weight_bytes for part in model_parts(opened_spec(tmp_path / "m.gguf"), "fp16"))
    spec, weights = opened(tmp_path / "m.gguf", tmp_path, "none" if kind == "F32" else None)
    found, expected = logits(spec, weights), expected_logits(model)
    if kind == "F32" or name == "qwen3-next":
        assert_same(found, expected)
    else:
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()
        assert weights.matrices["layers.1.attention.key_up"].layout == "int8"
    assert kind == "F32" or planned == weights.n_bytes


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    extra = {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    changes = {"{arch}.block_count": 4, "glm4moe.nextn_predict_layers": 1, "factors": extra}
    model = written("glm4.5", tmp_path / "m.gguf", **changes)
    assert_same(logits(*opened(tmp_path / "m.gguf", tmp_path, "none")), expected_logits(model))


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


def test_yarn_of_olmo_3_is_that_of_layers_without_a_window(tmp_path: Path) -> None:
    ropes = {"sliding_attention": PLAIN_ROPE, "full_attention": PLAIN_ROPE | YARN_ROPE | {"rope_theta": 500000.0}}
    model = random_model("olmo3", **(SMALL | {"rope_parameters": ropes}))
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 40}
    keys = {f"{{arch}}.rope.scaling.{key}": value for key, value in scaling.items()}
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F16", **keys)
    assert_same(logits(*opened(tmp_path / "m.gguf", tmp_path, "none"), LONG), expected_logits(model, LONG))


@pytest.mark.parametrize(("name", "n_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_27b_are_divided_by_the_share_of_the_hidden_size(tmp_path: Path, name: str, n_layers: int) -> None:
    """Which is 144 and 168 in published ones, of heads of 128."""
    written(name, tmp_path / "m.gguf", **{"{arch}.block_count": n_layers, "{arch}.attention.head_count": 8})
    header = read_gguf_header(tmp_path / "m.gguf")
    config = hf_config(header)
    assert config["query_pre_attn_scalar"] == 64 // 8 and config["head_dim"] == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, "granite-hybrid-dense", "gemma4-moe", "lfm2-moe", "nemotron-h"])
def test_llama_cpp_computes_the_same_of_these_files(tmp_path: Path, name: str) -> None:
    """That the tests' writer puts rows, norms and metadata where llama.cpp looks for them."""
    llama_cpp = pytest.importorskip("llama_cpp")
    family, sizes = FAMILIES[name]
    vocab_size = read_spec(demo_model_folder()).vocab_size
    if name == "gpt-oss":  # llama.cpp always begins and ends YaRN's blend at whole pairs
        sizes = sizes | {"rope_parameters": YARN_ROPE | {"rope_theta": 150000.0}}
    if name == "deepseek2":  # it knows V2-Lite by its 27 layers, and scores groups as V3 does
        sizes = sizes | {"num_hidden_layers": 27, "n_group": 1, "topk_group": 1}
    model = random_model(family, **(SMALL | sizes | {"vocab_size": vocab_size}))
    file, is_fused = tmp_path / "m.gguf", name == "gemma4-moe"
    write_gguf(model, file, lambda _: "F32", tokenizer=demo_model_folder(), is_fused=is_fused)
    options = {"n_ctx": 64, "n_threads": 1, "type_k": 0, "type_v": 0, "swa_full": True}
    theirs = llama_cpp.Llama(str(file), logits_all=True, verbose=False, **options)
    theirs.eval(IDS)
    found, expected = torch.tensor(np.array(theirs.scores[: len(IDS)])), expected_logits(model)
    # llama.cpp looks up GELU in a table of fp16.
    most = 3e-3 if name.startswith(("gemma", "starcoder2")) else 1e-5
    assert (found - expected).abs().max() < most * expected.abs().max()


@pytest.fixture(scope="module")
def unsplit_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its merges reach across words, digits and signs, so that each way of splitting shows in the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("unsplit")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=special, min_frequency=1)
    tokenizer.train_from_iterator(SPLIT_TEXTS * 3, trainer)
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


SPLIT_TEXTS = [
    "I'Ll say: it's 123456 or 1234; DON'T!!\r\n\r\n  end   of HTMLParser/x",
    "a\tb  c...\n\n\n!!! \u00e9t\u00e9 \u0926\u0935 \u0661\u0662\u0663 \u4f60\u597d2024",
    "a1b22\u4f60\u597d\u3042\u30a2 \uff08x\uff09 \u0391\u03b2\u03b3 \u0431?!/ab  \u201cq\u201d 1+1=2 ",
    "def f(x):\n    return x**2  # they're '90s  ",
]


@pytest.mark.slow
def test_llama_cpp_splits_text_the_same(tmp_path: Path, unsplit_tokenizer: Path) -> None:
    """Without combining marks, which its patterns of tekken and gpt-4o leave out, unlike those of the original."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = random_model("llama", **(SMALL | {"num_hidden_layers": 1, "vocab_size": 700}))
    different = set()
    for pre in SPLITTINGS:
        file = tmp_path / f"{pre}.gguf"
        write_gguf(model, file, lambda _: "F16", tokenizer=unsplit_tokenizer, **{"tokenizer.ggml.pre": pre})
        ours = Tokenizer.load(gguf_folder(file), 700)
        theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        ids = [tuple(ours.encode(text)) for text in SPLIT_TEXTS]
        assert ids == [tuple(theirs.tokenize(text.encode(), add_bos=True, special=True)) for text in SPLIT_TEXTS], pre
        different.add(tuple(ids))
    assert len(different) >= 5
