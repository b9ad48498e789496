"""config.json of newer families: what is published is read and planned, what is impossible refused by name."""

from typing import Any

import pytest

from hetero_ee.errors import ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from tests.emulation import planned
from tests.families import FAMILIES, config_of


def named(architecture: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [f"{architecture}ForCausalLM"]} | fields


NEWER = ["Gemma2", "Gemma3", "Olmo3", "SmolLM3", "Granite", "Starcoder2", "StableLm", "Glm4", "Exaone4"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GEMMA_3_4B = {  # as published: what is missing is the class's default
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def test_gemma_3_4b_as_published() -> None:
    spec = read_spec(GEMMA_3_4B)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.vocab_size, spec.tied_head) == (8, 4, 256, 262208, True)
    assert spec.sliding_windows[:7] == (1024,) * 5 + (None, 1024)
    full, near = spec.rope_of(5), spec.rope_of(6)
    assert full is not None and near is not None
    assert (full.theta, full.scaling.kind, full.scaling.factor) == (1e6, "linear", 8.0)
    assert (near.theta, near.scaling.kind) == (1e4, "default")
    assert spec.norm_offset == 1 and spec.post_norm and spec.qk_norm and spec.attention_scale == 1 / 16
    assert spec.attention_cap == spec.logit_cap == 0


def test_phi_4_is_a_phi_3() -> None:
    mini = named(
        "Phi3",
        **SIZES | {"num_attention_heads": 2},
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
        num_key_value_heads=1,
    )
    spec = read_spec(mini)
    assert spec.rope is not None and spec.rope.n_features == 24 and spec.tied_head


def test_nulls_take_caps_and_windows_away() -> None:
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}
    spec = read_spec(named("Gemma2", **SIZES | nulls))
    assert (spec.attention_cap, spec.logit_cap, set(spec.sliding_windows)) == (0.0, 0.0, {None})
    spec = read_spec(named("Exaone4", **SIZES | {"num_key_value_heads": 2, "sliding_window": None}))
    assert set(spec.sliding_windows) == {None} and spec.ropes == {spec.rope_of(layer) for layer in range(4)}


def test_a_pattern_of_letters_ends_with_a_layer_that_sees_all() -> None:
    spec = read_spec(named("Exaone4", **SIZES | {"num_key_value_heads": 2, "sliding_window_pattern": "LGL"}))
    assert spec.sliding_windows == (4096, None, 4096, None)


ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REFUSED = [
    (named("Lfm2", **SIZES, num_key_value_heads=2, full_attn_idxs=2), "full_attn_idxs is 2, expected a list of layers"),
    (named("Qwen3_5", **SIZES, linear_key_head_dim=512), "linear_key_head_dim is 512, expected a whole number from 1"),
    (named("StableLm", **SIZES, use_parallel_residual=True), "use_parallel_residual is true"),
    (named("StableLm", **SIZES, qk_layernorm=True), "qk_layernorm is true"),
    (named("StableLm", **SIZES, use_parallel_residual="no"), "use_parallel_residual is 'no', expected true or false"),
    (named("Gemma2", **SIZES, use_bidirectional_attention=True), "use_bidirectional_attention is true"),
    (named("Gemma2", **SIZES, query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
    (named("Gemma2", **SIZES, attn_logit_softcapping=-1), "attn_logit_softcapping is -1"),
    (named("Gemma2", **SIZES, layer_types=["full_attention"] * 3), "expected one entry for each of 4 layers"),
    (named("Gemma3", **SIZES, layer_types=["chunked_attention"] * 4), "layer_types names 'chunked_attention'"),
    (named("Gemma3", **SIZES, rope_parameters={"full_attention": {"rope_type": "odd"}}), "rope_type 'odd'"),
    (named("Gemma3", **SIZES, rope_parameters={"full_attention": 3}), "full_attention is 3, expected an object"),
    (named("Granite", **SIZES, logits_scaling=0), "logits_scaling is 0"),
    (named("Granite", **SIZES, residual_multiplier="a"), "residual_multiplier is 'a'"),
    (named("SmolLM3", **SIZES, no_rope_layers=[1, 0]), "no_rope_layers is [1, 0]"),
    (named("SmolLM3", **SIZES, no_rope_layers=[1, 0, 2, 1]), "expected a 0 or a 1"),
    (named("Exaone4", **SIZES, num_key_value_heads=2, sliding_window_pattern="LX"), "sliding_window_pattern is 'LX'"),
    (named("Exaone4", **SIZES, num_key_value_heads=2, sliding_window_pattern=0), "sliding_window_pattern is 0"),
    (named("Helium", **SIZES, num_key_value_heads=2, head_dim=8), "are not hidden_size 64"),
    (named("Glm", **SIZES, partial_rotary_factor=0.01), "partial_rotary_factor 0.01"),
    (named("Starcoder2", **SIZES, use_bias=1), "use_bias is 1"),
    (named("NemotronH", **SIZES, layers_block_type=[["moe"]]), "layers_block_type is [['moe']]"),
    (named("DeepseekV2", **SIZES, **ROUTED, mlp_layer_types=[[]] * 4), "mlp_layer_types is [[], [], [], []]"),
    (named("DeepseekV2", **SIZES, qk_nope_head_dim=2**24), "qk_nope_head_dim is 16777216"),
]


@pytest.mark.parametrize(("config", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_is_impossible_or_unknown_is_refused_by_name(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_spec(config)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_layers_of_one_model_turn_differently() -> None:
    spec: ModelSpec = read_spec(config_of("smollm3"))
    assert spec.rope_of(0) == spec.rope and spec.rope_of(1) is None and spec.ropes == {spec.rope}


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name][0] in NEWER])
def test_a_plan_takes_config_json_alone(name: str) -> None:
    spec = read_spec(config_of(name))
    plan = planned(spec, context_tokens=64)
    assert len(plan.parts) == 2 * spec.n_layers + 2  # embedding, and head with the norm before it
    norms = [tensor for tensor in all_tensors(decoder_blocks(spec)) if tensor.name.endswith("post_norm")]
    assert len(norms) == 2 * spec.n_layers * spec.post_norm
