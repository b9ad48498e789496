"""GGUF files: their weights in the store as they are or nearly, their models against transformers, their tokenizers."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee import Engine
from hetero_ee.config import demo_model_folder
from hetero_ee.errors import CheckpointError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import model_parts
from hetero_ee.planning.planner import shapes_sha256
from hetero_ee.profiling.preset import product_shapes
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.runtime.executors.dummy import dummy_weights
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import ModelWeights, as_stored, load_dense
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.library import stored_models
from hetero_ee.weights.store.reader import open_store
from hetero_ee.weights.store.source import Source
from hetero_ee.weights.weight import TileWeight
from tests.conftest import SHARED_MODELS
from tests.families import YARN_ROPE, random_model
from tests.gguf_models import write_gguf

pytest.importorskip("gguf")
TOLERANCE = 1e-4  # of the largest logit
LONG = [(7 * i) % 131 for i in range(100)]
IDS = [1, 17, 130, 3, 99, 42, 42, 7, 12, 77]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 132}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 132}
STORY = "Once upon a time there was a dog named Tom; he was 12 years old, and it's älter!\n\n  He didn't  bark.\tEnd"


def opened(file: Path, folder: Path, quantizer: str | None = None) -> tuple[ModelSpec, ModelWeights]:
    """The model as the engine opens it: from a store in `folder`, or in fp32."""
    its = gguf_folder(file, configuration_only=True)
    spec = read_spec(its)
    if quantizer == "none":
        return spec, load_dense(open_checkpoint(its, spec))
    store = convert(its, spec, folder / f"store-{quantizer}", Quantization.of_model(its, quantizer))
    weights = open_store(store, spec)
    return as_stored(spec, weights), weights


def logits(spec: ModelSpec, weights: ModelWeights, ids: list[int] = IDS) -> torch.Tensor:
    executor = ReferenceExecutor(spec, weights, 160)
    executor.cache.open(0)
    return executor.logits(Batch.of_sequence(0, 0, ids), range(len(ids)))


@torch.no_grad()
def expected_logits(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


GEMMA_3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
MINISTRAL_3_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
OLMO_3_ROPE = {"sliding_attention": PLAIN_ROPE, "full_attention": PLAIN_ROPE}
GRANITE_HYBRID = {"mamba_d_head": 32, "mamba_n_heads": 4, "mamba_d_state": 32}
LATENT = {"moe_intermediate_size": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 32, "num_key_value_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama-tied", {}),  # with biases, which are turned too
    "mistral": ("mistral-full", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 20, "tie_word_embeddings": False}),
    "qwen3.5": ("qwen3.5", {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}),
    "qwen3-moe": ("qwen3-moe", {"head_dim": 24, "mlp_only_layers": [], "moe_intermediate_size": 32}),
    "qwen3.5-moe": (
        "qwen3.5-moe",
        {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "gpt-oss": ("gpt-oss", {"head_dim": 16, "swiglu_limit": 7.0}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2-moe": ("lfm2-moe", {"moe_intermediate_size": 32}),
    "nemotron-h": (
        "nemotron-h",
        {"moe_intermediate_size": 32, "mamba_head_dim": 32}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]},
    ),
    "qwen3-next": (
        "qwen3-next",
        {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 4}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "norm_topk_prob": True}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "glm4-flash": ("glm4-flash", LATENT | {"q_lora_rank": 32}),
    "deepseek2": ("deepseek2", LATENT),
    "deepseek3": (
        "deepseek3",
        LATENT
        | {"q_lora_rank": 32, "rope_interleave": True}
        | {"rope_parameters": YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 0.8}},
    ),
    "glm4.5": ("glm4.5", {"moe_intermediate_size": 32, "head_dim": 32}),
    "granite-hybrid": ("granite-hybrid", GRANITE_HYBRID | {"shared_intermediate_size": 64}),
    "granite-hybrid-dense": (
        "granite-hybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "shared_intermediate_size": 96},
    ),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {"head_dim": 16, "attention_bias": False}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", GEMMA_3),
    "gemma4": ("gemma4", {"head_dim": 16, "global_head_dim": 32}),
    "gemma4-moe": ("gemma4-moe", {"head_dim": 16, "global_head_dim": 32, "moe_intermediate_size": 32}),
    "gemma4-e": ("gemma4-e", {"head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 132}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL_3_ROPE}),
    "olmo2": ("olmo2", {"attention_bias": False}),
    "olmo3": ("olmo3", {"rope_parameters": OLMO_3_ROPE}),
    "granite": ("granite", {}),
    "granite-untied": ("granite", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": True}),
    "starcoder2-untied": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "seed_oss": ("seed-oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "ernie4_5": ("ernie4.5", {"head_dim": 16, "use_bias": False}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_against_transformers(tmp_path: Path, name: str) -> None:
    """Every tensor in its place: rows of queries and keys, stacked matrices, biases, norms, tied heads."""
    family, changes = FAMILIES[name]
    model = random_model(family, **(SMALL | changes))
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F16")
    assert_same(logits(*opened(tmp_path / "m.gguf", tmp_path, "none")), expected_logits(model))


EXACT = {
    "Q4_0": {"layers.0.attention.qkv": "int4", "layers.0.ffn.down": "int4"},
    "IQ4_NL": {"layers.0.ffn.gate_up": "int4"},
    "MXFP4": {"layers.0.attention.output": "int4"},
    "Q8_0": {"layers.0.attention.qkv": "int8", "layers.0.ffn.down": "int8"},
    "Q5_0": {"layers.0.ffn.gate_up": "int5"},
}


@pytest.mark.parametrize("kind", EXACT)
def test_kept_types_are_exact(tmp_path: Path, kind: str) -> None:
    """Each weight of the store is the one that the gguf package makes of the file, to the bit."""
    model = random_model("llama", **SMALL)
    held = write_gguf(model, tmp_path / "m.gguf", lambda _: kind)
    spec, weights = opened(tmp_path / "m.gguf", tmp_path)
    down, output = (weights.matrices[f"layers.1.{name}"].dequantize() for name in ("ffn.down", "attention.output"))
    assert torch.equal(down, held["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(output, held["model.layers.1.self_attn.o_proj.weight"])
    parts = [held[f"model.layers.2.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weights.matrices["layers.2.attention.qkv"].dequantize(), torch.cat(parts))
    assert torch.equal(weights.matrices["embedding.tokens"].dequantize(), held["model.embed_tokens.weight"])
    for name, layout in EXACT[kind].items():
        assert dict(spec.matrix_layouts).get(name, "int4") == layout
        assert weights.matrices[name].layout == layout
    assert_same(logits(spec, weights), expected_logits(model))


# Relative squared error of a matrix, at most: of 8 bits, and of 4 on random weights of each type.
INEXACT = {
    "Q4_1": ("int4 zeros", 1e-8),  # codes are kept, zero points rounded to fp16
    "Q5_1": ("int5 zeros", 1e-8),
    "Q3_K": ("int4", 0.03),
    "Q4_K": ("int4 zeros", 1e-7),  # likewise, and scales of 17 bits
    "Q5_K": ("int5 zeros", 1e-7),
    "Q6_K": ("int6", 1e-6),
    "IQ4_XS": ("int4", 1e-7),  # its codes are kept, and its scales of 17 bits become fp16
    "F16": ("int4", 0.01),
    "BF16": ("int4", 0.01),
}


@pytest.mark.parametrize("kind", INEXACT)
def test_other_types_come_near(tmp_path: Path, kind: str) -> None:
    layout, most = INEXACT[kind]
    held = write_gguf(random_model("llama", num_hidden_layers=1, **WIDE), tmp_path / "m.gguf", lambda _: kind)
    spec, weights = opened(tmp_path / "m.gguf", tmp_path)
    down, expected = weights.matrices["layers.0.ffn.down"], held["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, TileWeight) and down.layout == layout
    assert dict(spec.matrix_layouts).get("layers.0.ffn.down", "int4") == layout
    error = float((down.dequantize() - expected).square().sum() / expected.square().sum())
    assert 0 < error < most
    store = json.loads((tmp_path / "store-None" / "manifest.json").read_text())
    rows = [row for row in store["source"]["types"] if row["layout"] == layout]
    assert [row["types"] for row in rows] == [kind] and 0 < rows[0]["relative_squared_error"] < most


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q5_1", "Q5_K"])
def test_codes_with_minimums_are_kept(tmp_path: Path, kind: str) -> None:
    """Queries in Q4_0 have none; the rest is where the file has it, and plans count its bytes."""
    model = random_model("llama", num_hidden_layers=2, **WIDE)
    held = write_gguf(model, tmp_path / "m.gguf", lambda name: "Q4_0" if "attn_q." in name else kind)
    spec, weights = opened(tmp_path / "m.gguf", tmp_path)
    shorts = ("attention.output", "attention.qkv", "ffn.down", "ffn.gate_up")
    layout = f"int{kind[1]} zeros"
    assert spec.matrix_layouts == tuple((f"layers.{layer}.{short}", layout) for layer in (0, 1) for short in shorts)
    assert read_spec(gguf_folder(tmp_path / "m.gguf", configuration_only=True)) == spec
    assert sum(part.weight_bytes for part in model_parts(spec, "fp16")) == weights.n_bytes
    assert dummy_weights(spec).n_bytes == weights.n_bytes
    assert product_shapes(spec) == product_shapes(spec.in_plain_int4) and shapes_sha256(spec) != shapes_sha256(
        spec.in_plain_int4
    )
    for part, rows in (("q", slice(0, 256)), ("v", slice(-128, None))):
        found = weights.matrices["layers.1.attention.qkv"].dequantize()[rows]
        expected = held[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert (found - expected).abs().max() <= (0 if part == "q" else 1e-3 * expected.abs().max())
    model.model.embed_tokens.weight.data = weights.matrices["embedding.tokens"].dequantize()  # 8 bits, of other types
    model.lm_head.weight.data = weights.matrices["head.tokens"].dequantize()
    assert (logits(spec, weights) - expected_logits(model)).abs().max() < 1e-3 * expected_logits(model).abs().max()


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_cpu_kernels_multiply_what_is_left_of_codes(tmp_path: Path, kind: str) -> None:
    """Near the reference on the same weights, and with the same bits for each token alone and all together."""
    write_gguf(random_model("llama", num_hidden_layers=1, **WIDE), tmp_path / "m.gguf", lambda _: kind)
    spec, weights = opened(tmp_path / "m.gguf", tmp_path)
    expected, executor = logits(spec, weights), CpuExecutor(spec, weights, 160, 1)
    alone, together = executor.cache.open_new(), executor.cache.open_new()
    parts = [executor.logits(Batch.of_sequence(alone, place, [token]), [0]) for place, token in enumerate(IDS)]
    found = executor.logits(Batch.of_sequence(together, 0, IDS), range(len(IDS)))
    assert torch.equal(torch.cat(parts), found)
    assert (found - expected).square().sum() < 1e-3 * expected.square().sum()


def test_a_neuron_major_store_is_listed_with_its_format(tmp_path: Path) -> None:
    write_gguf(random_model("llama", **SMALL), tmp_path / "m.gguf", lambda _: "Q8_0")
    folder, target = gguf_folder(tmp_path / "m.gguf", configuration_only=True), tmp_path / "stores" / "m"
    convert(folder, read_spec(folder), target, Quantization.of_model(folder, "rtn", neuron_major=True))
    (found,) = stored_models(tmp_path)
    assert (found.source_format, found.quantizer) == ("GGUF", "rtn")


def test_mixed_matrices_take_8_bits_whole(tmp_path: Path) -> None:
    """Queries and keys in Q4_K and values in Q6_K, as Q4_K_M has them, are one matrix here."""
    kinds = {"blk.0.attn_v.weight": "Q6_K", "token_embd.weight": "Q6_K", "output.weight": "Q6_K"}
    model = random_model("llama", num_hidden_layers=2, **WIDE)
    write_gguf(model, tmp_path / "m.gguf", lambda name: kinds.get(name, "Q4_K"))
    spec, weights = opened(tmp_path / "m.gguf", tmp_path)
    assert ("layers.0.attention.qkv", "int8") in spec.matrix_layouts
    assert sum(part.weight_bytes for part in model_parts(spec, "fp16")) == weights.n_bytes  # as plans count them
    assert dummy_weights(spec).n_bytes == weights.n_bytes
    assert product_shapes(spec) == product_shapes(spec.in_plain_int4)  # one profile serves both
    assert shapes_sha256(spec) != shapes_sha256(replace(spec, matrix_layouts=()))
    assert read_spec(gguf_folder(tmp_path / "m.gguf", configuration_only=True)) == spec
    error = (logits(spec, weights) - expected_logits(model)).square().mean() / expected_logits(model).square().mean()
    assert error < 0.05
    spec, weights = opened(tmp_path / "m.gguf", tmp_path, "search")  # asked for, so that all is in 4 bits
    assert spec.matrix_layouts == () and weights.matrices["layers.0.attention.qkv"].layout == "int4"


def test_kept_parts_of_two_types_are_exact_in_8_bits(tmp_path: Path) -> None:
    model = random_model("llama", num_hidden_layers=1, **SMALL)
    held = write_gguf(model, tmp_path / "m.gguf", lambda name: "Q8_0" if "attn_v" in name else "Q4_0")
    _, weights = opened(tmp_path / "m.gguf", tmp_path)
    parts = [held[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weights.matrices["layers.0.attention.qkv"].dequantize(), torch.cat(parts))


def test_scaled_rope_llama3(tmp_path: Path) -> None:
    """llama.cpp's converter writes the factors of each frequency as a tensor."""
    model = random_model("llama3", **(SMALL | {"head_dim": 16}))
    factors = plain_frequencies(50000.0, 16) / model.model.rotary_emb.inv_freq
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F16", factors={"rope_freqs.weight": factors.numpy()})
    assert_same(logits(*opened(tmp_path / "m.gguf", tmp_path, "none"), LONG), expected_logits(model, LONG))


def test_scaled_rope_longrope(tmp_path: Path) -> None:
    """Phi-3's, whose short factors count up to the original context."""
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 8, 8, dtype=np.float32)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short.tolist()}
    rope |= {"long_factor": long.tolist(), "original_max_position_embeddings": 160}
    changes = {"original_max_position_embeddings": 160, "rope_parameters": rope}
    model = random_model("phi3-longrope", **(SMALL | changes))
    magnitude = float(model.model.rotary_emb.attention_scaling)
    metadata = {"{arch}.rope.scaling.original_context_length": 160, "{arch}.rope.scaling.attn_factor": magnitude}
    both = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F16", factors=both, **metadata)
    assert_same(logits(*opened(tmp_path / "m.gguf", tmp_path, "none"), LONG), expected_logits(model, LONG))


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaled_rope_of_metadata(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 40} if kind == "yarn" else {}
    model = random_model("qwen2", **(SMALL | {"rope_parameters": rope}))
    metadata = {"{arch}.rope.scaling.type": kind, "{arch}.rope.scaling.factor": 4.0}
    metadata |= {"{arch}.rope.scaling.original_context_length": 40} if kind == "yarn" else {}
    write_gguf(model, tmp_path / "m.gguf", lambda _: "F16", **metadata)
    assert_same(logits(*opened(tmp_path / "m.gguf", tmp_path, "none"), LONG), expected_logits(model, LONG))


def plain_frequencies(theta: float, n_features: int) -> torch.Tensor:
    return theta ** (-torch.arange(0, n_features, 2) / n_features)


TEXTS = (STORY, "", " ", "  two", "caf\u00e9 \u4f60\u597d \U0001f600", "<s>x</s>", "1234567 8", "\n\n a", "don't DON'T")


@pytest.mark.parametrize("name", ["demo", "stories260K", "tiny12"])
def test_tokenizers_give_the_ids_of_the_original(tmp_path: Path, name: str) -> None:
    folder = demo_model_folder() if name == "demo" else SHARED_MODELS / name
    if not folder.is_dir():
        pytest.skip("the shared models are not here")
    vocab_size = read_spec(folder).vocab_size
    model = random_model("llama", **(SMALL | {"num_hidden_layers": 1, "vocab_size": vocab_size}))
    write_gguf(model, tmp_path / "m.gguf", lambda _: "Q8_0", tokenizer=folder)
    ours = Tokenizer.load(gguf_folder(tmp_path / "m.gguf"), vocab_size)
    theirs = Tokenizer.load(folder, vocab_size)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.eos_token_id == theirs.eos_token_id


def test_the_demo_model_from_a_file(tmp_path: Path) -> None:
    """Generates what the engine generates of the same weights in safetensors, is listed, and needs its file no more."""
    import transformers

    folder, file = demo_model_folder(), tmp_path / "demo Q8.gguf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    write_gguf(model, file, lambda _: "Q8_0", tokenizer=folder, **template)
    model.save_pretrained(tmp_path / "same")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "same")
    with Engine.from_pretrained(file, profile="off") as engine:
        found = engine.generate("Once upon a time", max_new_tokens=20)
        assert engine.quantizer == "gguf"
        with engine.chat() as chat:
            assert "".join(token.text for token in chat.send("Hello", max_new_tokens=4))
    with Engine.from_pretrained(tmp_path / "same", quantizer="none", profile="off") as engine:
        expected = engine.generate("Once upon a time", max_new_tokens=20)
    assert found.text == expected.text
    file.unlink()
    with Engine.from_pretrained("demo_Q8-gguf", profile="off") as engine:
        assert engine.generate("Once upon a time", max_new_tokens=20).text == expected.text


def test_parts_are_the_file_that_was_split(tmp_path: Path) -> None:
    """The same store and logits, from whichever part; one that changes is converted again."""
    model = random_model("llama", **SMALL)
    n_tensors = len(model.state_dict())
    write_gguf(model, tmp_path / "m.gguf", lambda _: "Q4_0")
    write_gguf(model, tmp_path / "m.gguf", lambda _: "Q4_0", part_tensors=-(-n_tensors // 3))
    parts = sorted(tmp_path.glob("m-*-of-00003.gguf"))
    assert len(parts) == 3
    (tmp_path / "whole").mkdir()
    expected = logits(*opened(tmp_path / "m.gguf", tmp_path / "whole"))
    torch.testing.assert_close(logits(*opened(parts[1], tmp_path)), expected, rtol=0, atol=0)
    data = {folder: sorted(folder.glob("store-None/*.bin")) for folder in (tmp_path, tmp_path / "whole")}
    assert data[tmp_path] and len({b"".join(f.read_bytes() for f in files) for files in data.values()}) == 1
    folders = {gguf_folder(part, configuration_only=True) for part in parts}
    assert len(folders) == 1 and folders.pop().name == "m"
    before = Source.of(gguf_folder(parts[0], configuration_only=True))
    changed = bytearray(parts[2].read_bytes())
    changed[-1] ^= 1
    parts[2].write_bytes(changed)
    after = Source.of(gguf_folder(parts[0], configuration_only=True))
    now = {file.name for file in set(after.files) - set(before.files) if file.name.endswith(".gguf")}
    assert now == {parts[2].name}


def test_metadata_changed_in_place_is_read_again(tmp_path: Path, cache: Path) -> None:
    """Even if the file's time is restored, as some editors of metadata do."""
    file = tmp_path / "model.gguf"
    write_gguf(random_model("llama", **SMALL), file, lambda name: "F32")
    folder = gguf_folder(file, configuration_only=True)
    (folder / "tokenizer.json").write_text("of the older header")
    before, times, data = read_spec(folder), file.stat(), bytearray(file.read_bytes())
    place = data.index(b"llama.rope.freq_base") + len("llama.rope.freq_base") + 4
    data[place : place + 4] = np.float32(12345).tobytes()
    with file.open("r+b") as opened_file:
        opened_file.write(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CheckpointError, match="has changed since it was translated"):
        open_checkpoint(folder, before)
    after = read_spec(gguf_folder(file, configuration_only=True))
    assert before.rope is not None and after.rope is not None
    assert (before.rope.theta, after.rope.theta) == (10000.0, 12345.0)
    assert not (folder / "tokenizer.json").exists()


def test_a_file_cut_short_during_its_conversion_is_refused(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(random_model("llama", **SMALL), file, lambda name: "F32")
    folder = gguf_folder(file, configuration_only=True)
    spec, quantization = read_spec(folder), Quantization.of_model(folder, None)

    def cut(*_: object) -> None:
        os.truncate(file, 4096)

    with pytest.raises(CheckpointError, match="was cut short while it was read"):
        convert(folder, spec, tmp_path / "store", quantization, progress=cut)
    assert not list(tmp_path.glob("store*/"))
