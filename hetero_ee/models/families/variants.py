"""Define the families that differ from Llama in a few places: defaults of config.json and fields of the spec."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.models.families import llama
from hetero_ee.models.families.family import (
    FULL,
    SLIDING,
    TANH_GELU,
    layer_count,
    read_layer_kinds,
    read_window,
    sliding_windows,
)
from hetero_ee.models.families.rope_fields import of_layer_kind, read_growth, without_mrope
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

Values = Mapping[str, Any]
Computed = Callable[[Fields, ModelSpec], Values]


@dataclass(frozen=True, slots=True)
class Variant:
    """A family whose config.json is read with Llama's reader, with its own defaults and fields."""

    defaults: Values  # of fields that config.json lacks
    spec: Values  # fields of every spec of this family
    computed: Computed = lambda fields, spec: {}  # further fields of the spec
    prepared: Callable[[Fields], Fields] = lambda fields: fields  # renames fields, or refuses them
    rotates_part: bool = False
    interleaved: bool = False

    def __call__(self, fields: Fields, architecture: str) -> ModelSpec:
        fields = self.prepared(fields.with_defaults(**self.defaults))
        ways = {"rotates_part": self.rotates_part, "interleaved": self.interleaved}
        spec = llama.read_spec(fields, architecture, **ways)
        return replace(spec, **{**self.spec, **self.computed(fields, spec)})


def _bias_named(name: str, default: bool) -> Callable[[Fields], Fields]:
    """Return a function that sets the flags for all biases to the flag in the field `name`."""

    def prepared(fields: Fields) -> Fields:
        bias = fields.flag(name, default)
        return fields.with_values(attention_bias=bias, mlp_bias=bias)

    return prepared


def _one_window(fields: Fields, spec: ModelSpec) -> Values:
    return {"sliding_windows": (read_window(fields),) * spec.n_layers}


def _ministral_layers(fields: Fields, spec: ModelSpec) -> Values:
    """Return layers whose queries grow with their position."""
    windowed = replace(spec, **UNBIASED, **_optional_window(fields, spec))
    return {"own_layers": windowed.changed_layers(query_growth=read_growth(fields))}


def _optional_window(fields: Fields, spec: ModelSpec) -> Values:
    return {"sliding_windows": (fields.optional_integer("sliding_window"),) * spec.n_layers}


def _qwen_windows(fields: Fields, spec: ModelSpec) -> Values:
    """Return each layer's window: layer_types names each layer's kind, or layers from max_window_layers on have one."""
    if not fields.flag("use_sliding_window", False):
        return {"sliding_windows": (None,) * spec.n_layers}
    window, first = read_window(fields), fields.number("max_window_layers", 28)
    kinds = read_layer_kinds(fields, [SLIDING if layer >= first else FULL for layer in range(spec.n_layers)])
    return {"sliding_windows": sliding_windows(kinds, window)}


def _granite_scales(fields: Fields, spec: ModelSpec) -> Values:
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "logit_scale": 1 / fields.number("logits_scaling", 1.0),
    }


def _granite_fields(fields: Fields) -> Fields:
    if not fields.number("logits_scaling", 1.0):
        raise fields.fail("logits_scaling is 0, expected a number above 0.")
    return fields


def _helium_heads(fields: Fields, spec: ModelSpec) -> Values:
    if spec.query_size != spec.hidden_size:
        raise fields.fail(
            f"num_attention_heads {spec.n_heads} of head_dim {spec.head_dim} are not hidden_size {spec.hidden_size}, "
            "as this architecture needs."
        )
    return {"attention_output_bias": False}


def _stablelm_fields(fields: Fields) -> Fields:
    fields.refuse_flag("use_parallel_residual", "an FFN parallel to the attention (as in stablelm-2-12b)")
    fields.refuse_flag("qk_layernorm", "a LayerNorm per head (as in stablelm-2-12b)")
    return fields


def _stablelm_norm(fields: Fields, spec: ModelSpec) -> Values:
    return {"norm_eps": fields.number("layer_norm_eps", 1e-5), "qkv_bias": fields.flag("use_qkv_bias", False)}


def _starcoder2_norm(fields: Fields, spec: ModelSpec) -> Values:
    return {"norm_eps": fields.number("norm_epsilon", 1e-5), **_optional_window(fields, spec)}


def _smollm3_layers(fields: Fields, spec: ModelSpec) -> Values:
    """Return each layer's window and rotary embedding. Some layers do not rotate (NoPE, arXiv 2305.19466)."""
    n_layers, interval = spec.n_layers, fields.integer("no_rope_layer_interval", 4)
    rotates = fields.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(n_layers)])
    if not isinstance(rotates, list | tuple) or len(rotates) < n_layers or any(each not in (0, 1) for each in rotates):
        raise fields.fail(f"no_rope_layers is {shown(rotates)}, expected a 0 or a 1 for each of {n_layers} layers.")
    rotates = rotates[:n_layers]
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    kinds = read_layer_kinds(fields, [FULL if each else SLIDING for each in rotates])
    ropes = tuple(spec.rope if each else None for each in rotates)
    return {"sliding_windows": sliding_windows(kinds, window), "layer_ropes": ropes}


def _exaone_layers(fields: Fields, spec: ModelSpec) -> Values:
    """Return each layer's window and rotary embedding. If some layers have a window, the others do not rotate."""
    window = read_window(fields)
    kinds = (FULL,) * spec.n_layers if window is None else read_layer_kinds(fields, _exaone_pattern(fields))
    ropes = tuple(spec.rope if window is None or kind == SLIDING else None for kind in kinds)
    return {"sliding_windows": sliding_windows(kinds, window), "layer_ropes": ropes}


def _exaone_pattern(fields: Fields) -> list[str]:
    n_layers, pattern = layer_count(fields), fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        kinds = [SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in range(n_layers)]
        return [*kinds[:-1], FULL]
    if not isinstance(pattern, int) or pattern < 1:
        raise fields.fail(f"sliding_window_pattern is {shown(pattern)}, expected a number of layers, or L and G.")
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(n_layers)]


def _seed_oss_bias(fields: Fields, spec: ModelSpec) -> Values:
    return {"attention_output_bias": fields.flag("attention_out_bias", False)}


def _gemma_fields(fields: Fields) -> Fields:
    """Replace the activation gelu by its tanh approximation, which Gemma 1's files mean by it."""
    act = fields.get("hidden_activation", fields.get("hidden_act", TANH_GELU))
    return fields.with_values(hidden_act=TANH_GELU if act == "gelu" else act, mlp_bias=None)


def later_gemma_fields(fields: Fields) -> Fields:
    fields.refuse_flag("use_bidirectional_attention", "attention to later tokens")
    return fields.with_values(hidden_act=fields.get("hidden_activation", TANH_GELU), mlp_bias=None)


def gemma_scale(fields: Fields, spec: ModelSpec) -> Values:
    return {"embedding_scale": math.sqrt(spec.hidden_size)}


def _later_gemma_scales(fields: Fields, spec: ModelSpec) -> Values:
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if not scalar:
        raise fields.fail("query_pre_attn_scalar is 0, expected a number above 0.")
    return {"attention_scale": scalar**-0.5, **gemma_scale(fields, spec)}


def _gemma_2_layers(fields: Fields, spec: ModelSpec) -> Values:
    """Return Gemma 2's scales, caps (null means none) and windows, which every other layer has."""
    kinds = read_layer_kinds(fields, [FULL if layer % 2 else SLIDING for layer in range(spec.n_layers)])
    caps = {"attention_cap": ("attn_logit_softcapping", 50.0), "logit_cap": ("final_logit_softcapping", 30.0)}
    return {
        "sliding_windows": sliding_windows(kinds, read_window(fields)),
        **{cap: 0.0 if fields.is_null(name) else fields.number(name, most) for cap, (name, most) in caps.items()},
        **_later_gemma_scales(fields, spec),
    }


def values(**fields: Any) -> Values:
    return fields


UNBIASED = values(qkv_bias=False, attention_output_bias=False, ffn_bias=False)
AFTER = values(pre_norm=False, post_norm=True, qk_norm=True)  # norms after attention and FFN, not before
# Mistral: arXiv 2310.06825, Qwen2: arXiv 2407.10671, Qwen3: arXiv 2505.09388, OLMo 2: arXiv 2501.00656
MISTRAL = Variant(values(num_key_value_heads=8, max_position_embeddings=131072), UNBIASED, _one_window)
MINISTRAL_3 = Variant(
    values(num_key_value_heads=8, max_position_embeddings=262144, rms_norm_eps=1e-5), UNBIASED, _ministral_layers
)
MIXTRAL = Variant(
    values(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5), UNBIASED, _optional_window
)
QWEN_2 = Variant(
    values(num_key_value_heads=32, max_position_embeddings=32768), {**UNBIASED, "qkv_bias": True}, _qwen_windows
)
QWEN_3 = Variant(
    values(head_dim=128, num_key_value_heads=32, max_position_embeddings=32768),
    values(ffn_bias=False, qk_norm=True),
    _qwen_windows,
)
OLMO_2 = Variant(values(rms_norm_eps=1e-5), {**AFTER, "ffn_bias": False, "qk_norm_whole": True})
OLMOE = Variant(values(max_position_embeddings=4096, rms_norm_eps=1e-5), values(qk_norm=True, qk_norm_whole=True))
# Phi-3 (arXiv 2404.14219): checkpoints stack matrices with the same input.
PHI_3 = Variant(
    values(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5),
    UNBIASED,
    _optional_window,
    rotates_part=True,
)
SMOLLM_3 = Variant(
    values(num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, tie_word_embeddings=True),
    {},
    _smollm3_layers,
)
GRANITE = Variant({}, {}, _granite_scales, _granite_fields)  # IBM's 3 and 4, dense: four factors
# Starcoder2: LayerNorm, biases everywhere, an FFN of two matrices
STARCODER_2 = Variant(
    values(num_key_value_heads=2, max_position_embeddings=4096, hidden_act=TANH_GELU, tie_word_embeddings=True),
    values(norm="layer", gated=False),
    _starcoder2_norm,
    _bias_named("use_bias", True),
)
# StableLM (arXiv 2402.17834): LayerNorm, and a quarter of each head rotates.
STABLELM = Variant(
    values(num_key_value_heads=32, max_position_embeddings=4096, partial_rotary_factor=0.25, hidden_act="silu"),
    values(norm="layer", attention_output_bias=False, ffn_bias=False),
    _stablelm_norm,
    _stablelm_fields,
    rotates_part=True,
)
SEED_OSS = Variant(
    values(num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True),
    {},
    _seed_oss_bias,
)
# In these, adjacent features of a head rotate together. GLM-4 (arXiv 2406.12793) rotates half of each head, and has
# more norms since April 2025. Helium is Kyutai's, ERNIE 4.5 (dense) Baidu's.
_GLM = values(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-7)
GLM = Variant(
    {**_GLM, "partial_rotary_factor": 0.5, "attention_bias": True},
    values(attention_output_bias=False, ffn_bias=False),
    rotates_part=True,
    interleaved=True,
)
GLM_4 = replace(GLM, spec={**GLM.spec, "post_norm": True})
HELIUM = Variant(
    values(num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=1e5),
    {},
    _helium_heads,
    interleaved=True,
)
_ERNIE = values(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5)
ERNIE = Variant(
    {**_ERNIE, "rope_theta": 500000.0, "tie_word_embeddings": True},
    {},
    prepared=_bias_named("use_bias", False),
    interleaved=True,
)
EXAONE_4 = Variant(  # arXiv 2507.11407
    values(num_key_value_heads=32, rms_norm_eps=1e-5),
    AFTER,
    _exaone_layers,
    lambda fields: fields.with_values(attention_bias=None, mlp_bias=None),
)
# Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) and 3 (2503.19786): checkpoints store norms' scales minus 1.
_GEMMA = values(head_dim=256, tie_word_embeddings=True)
LATER_GEMMA = {**_GEMMA, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
GEMMA = Variant(
    {**_GEMMA, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    values(norm_offset=1.0),
    gemma_scale,
    _gemma_fields,
)
GEMMA_2 = Variant(
    {**LATER_GEMMA, "max_position_embeddings": 8192},
    values(norm_offset=1.0, post_norm=True),
    _gemma_2_layers,
    later_gemma_fields,
)
_GEMMA_3 = Variant(
    {**LATER_GEMMA, "max_position_embeddings": 131072},
    values(norm_offset=1.0, post_norm=True, qk_norm=True),
    _later_gemma_scales,
    later_gemma_fields,
)


def read_mistral_3(fields: Fields, architecture: str) -> ModelSpec:
    """Read the text part of Mistral 3, which is a Mistral or a Ministral 3."""
    is_new = fields.text("model_type", "mistral") == "ministral3"
    return (MINISTRAL_3 if is_new else MISTRAL)(fields, architecture)


def read_olmo_3(fields: Fields, architecture: str) -> ModelSpec:
    """Read OLMo 3 (arXiv 2512.13961): every fourth layer sees all positions, and only its rotary angles are scaled."""
    theta = fields.number("rope_theta", 500000.0)
    return _with_two_ropes(OLMO_2, fields, architecture, 4, {FULL: theta, SLIDING: theta})


def read_gemma_3(fields: Fields, architecture: str) -> ModelSpec:
    """Read Gemma 3. Every sixth layer sees all positions and has its own rotary angles."""
    every = fields.integer("sliding_window_pattern", 6)
    thetas = {FULL: fields.number("rope_theta", 1e6), SLIDING: fields.number("rope_local_base_freq", 1e4)}
    spec = _with_two_ropes(_GEMMA_3, fields, architecture, every, thetas)
    return replace(spec, logit_cap=fields.number("final_logit_softcapping", 0.0))


def _with_two_ropes(
    variant: Variant, fields: Fields, architecture: str, every: int, thetas: Mapping[str, float]
) -> ModelSpec:
    default = [SLIDING if (layer + 1) % every else FULL for layer in range(layer_count(fields))]
    kinds = read_layer_kinds(fields, default)
    full, near = (variant(of_layer_kind(fields, kind, theta), architecture) for kind, theta in thetas.items())
    ropes = tuple(full.rope if kind == FULL else near.rope for kind in kinds)
    return replace(full, sliding_windows=sliding_windows(kinds, read_window(fields)), layer_ropes=ropes)


def read_qwen_2_5_vl(fields: Fields, architecture: str) -> ModelSpec:
    """Read Qwen2.5-VL's text part (arXiv 2502.13923)."""
    return QWEN_2(without_mrope(fields), architecture)
