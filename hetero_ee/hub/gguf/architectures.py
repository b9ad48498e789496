"""The supported architectures of GGUF files. To add one, add an entry to ARCHITECTURES.

Source: llama.cpp's converter (conversion/) and graphs (src/models/), and the names of the gguf package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.hub.gguf.architecture_names import (
    AFTER_ATTENTION,
    CAPS,
    DEEPSEEK_FIELDS,
    EXPERTS,
    FUSED,
    GEMMA_4_FIELDS,
    GEMMA_4_NAMES,
    GRANITE_HYBRID_FIELDS,
    GRANITE_HYBRID_NAMES,
    LFM_2_EXPERTS,
    LFM_2_NAMES,
    LINEAR,
    LINEAR_NAMES,
    NEMOTRON_FIELDS,
    NEMOTRON_NAMES,
    QWEN_EXPERTS,
    ROUTED,
    ROUTED_NAMES,
)
from hetero_ee.hub.gguf.header import GgufHeader
from hetero_ee.models.families.qwen3_5 import TILED_FIELD

Config = dict[str, Any]  # fields of config.json; None if the file does not have one
# (field of config.json, key in the file) of the norms' epsilon.
RMS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
LAYER = "attention.layer_norm_epsilon"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
THETA, NEAR_THETA = "rope.freq_base", "rope.freq_base_swa"
DEFAULT_THETA = 10000.0
LARGEST_DIVISOR = 1e20  # of frequencies of features that rotate; llama.cpp divides the others by 1e30
MAX_PREDICTING = 16
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
KEY_VALUE, YARN_MULTIPLIER = ("key", "value"), "rope.scaling.yarn_log_multiplier"
# What files without these fields' keys mean, and not the families' defaults.
UNSAID: Config = {"n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
UNSAID |= {"routed_scaling_factor": 1.0, "norm_topk_prob": False}
GEMMA_2_27B_LAYERS, GEMMA_3_27B_LAYERS = 46, 62


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Translation of one general.architecture to config.json and the tensors of Hugging Face's checkpoints."""

    hf_class: str
    norm_eps: tuple[str, str] = RMS
    fields: Mapping[str, str] = field(default_factory=dict)  # further fields of config.json -> the file's keys
    more: Callable[[GgufHeader, Config], Config] | None = None  # computes fields that no key holds directly
    names: Mapping[str, str] = field(default_factory=dict)  # modules that are named differently from Llama's
    is_interleaved: bool = False  # adjacent rows of queries and keys rotate together, not the halves of a head
    rotates_part: bool = False  # only a part of a head rotates
    has_rope_factors: bool = False
    is_latent: bool = False  # sizes of keys and values are not those of heads
    differs: tuple[str, ...] = ()  # fields whose keys may differ from layer to layer, which `more` reads
    logarithms: tuple[str, ...] = ()  # ends of names of parameters of which files have -e^x


def architecture_of(header: GgufHeader) -> GgufArchitecture:
    """Return the translation for the file's architecture. Raises ModelError if the architecture is not supported."""
    name = header.architecture
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise header.failure(
            f"architecture {shown(name or 'none named')} is not supported in GGUF files; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def predicting_layers(header: GgufHeader) -> int:
    """Return how many of the file's last layers predict further tokens. Raises: ModelError: if it isn't a number."""
    n_layers = header.get("nextn_predict_layers") or 0
    if type(n_layers) is not int or not 0 <= n_layers <= MAX_PREDICTING:
        raise header.failure(f"nextn_predict_layers is {shown(n_layers)}, expected 0 to {MAX_PREDICTING}")
    return n_layers


def head_share(config: Config) -> Any:
    """Return the hidden size divided by the number of heads; None if the fields are not numbers."""
    hidden_size, n_heads = config["hidden_size"], config["num_attention_heads"]
    if type(n_heads) is not int or type(hidden_size) is not int or n_heads < 1:
        return None
    return hidden_size // n_heads


def _gemma_2(header: GgufHeader, config: Config) -> Config:
    return _one_theta(header) | _pattern(header, 2) | _query_scalar(config, GEMMA_2_27B_LAYERS)


def _gemma_3(header: GgufHeader, config: Config) -> Config:
    """Return Gemma 3's rotary bases and layer types. Without a window, all layers see all positions."""
    near = header.get(NEAR_THETA)
    thetas = {"rope_theta": _theta(header), "rope_local_base_freq": DEFAULT_THETA if near is None else near}
    every = _pattern(header, 6) if header.get(WINDOW) else {"sliding_window_pattern": 1}
    return thetas | every | _query_scalar(config, GEMMA_3_27B_LAYERS)


def _gemma_4(header: GgufHeader, config: Config) -> Config:
    """Return the fields of Gemma 4's layers, which differ if they have a window."""
    n_layers, near_theta, near_size = (
        config["num_hidden_layers"],
        header.get(NEAR_THETA),
        header.get("attention.key_length_swa"),
    )
    if header.get("rope.dimension_count_swa") not in (None, near_size):
        raise header.failure("only a part of its heads rotates in layers with a window, which is not supported")
    kinds = _pattern(header, 6).get("layer_types")
    if not kinds or len(kinds) != n_layers:
        raise header.failure(f"{header.architecture}.{PATTERN} has no flag for each layer")
    heads = dict(zip(kinds, header.each("attention.head_count_kv", n_layers), strict=True))
    sizes, divisors = header.each("feed_forward_length", n_layers), config["rope_scaling"].get("short_factor", [1.0])
    rotating = sum(divisor < LARGEST_DIVISOR for divisor in divisors) / len(divisors)
    table, full = header.tensors.get("per_layer_token_embd.weight"), "full_attention"
    return {
        "layer_types": kinds,
        "head_dim": near_size,
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": heads.get("sliding_attention", heads.get(full)),
        "num_global_key_value_heads": heads.get(full),
        "attention_k_eq_v": full in kinds and f"blk.{kinds.index(full)}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": header.get("attention.shared_kv_layers"),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "enable_moe_block": bool(header.get("expert_count")),
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": DEFAULT_THETA if near_theta is None else near_theta},
            full: {"rope_type": "proportional", "rope_theta": _theta(header), "partial_rotary_factor": rotating},
        },
    }


def _mistral_3(header: GgufHeader, config: Config) -> Config:
    """Return Ministral 3's rotary scaling, which leaves magnitudes as they are, and the growth of its queries."""
    growth, rope = header.get("attention.temperature_scale"), config["rope_scaling"]
    yarn = {"mscale": 1.0, "mscale_all_dim": 1.0} if rope["rope_type"] == "yarn" else {}
    return {"rope_scaling": rope | yarn | ({"llama_4_scaling_beta": growth} if growth else {})}


def _olmo(header: GgufHeader, config: Config) -> Config:
    """Return the fields of OLMo 3 if the file has a window, else none: OLMo 2 and 3 share an architecture name."""
    if not header.get(WINDOW):
        return {}
    thetas = _one_theta(header) | {"rope_theta": _theta(header)}
    return {"architectures": ["Olmo3ForCausalLM"]} | thetas | _pattern(header, 4)


def _granite(header: GgufHeader, config: Config) -> Config:
    if header.get("rope.scaling.finetuned") is False:
        raise header.failure("its heads do not rotate (rope.scaling.finetuned is false), which is not supported")
    return _granite_factors(header, config)


def _granite_hybrid(header: GgufHeader, config: Config) -> Config:
    n_heads, size = config["mamba_n_heads"], header.get("ssm.inner_size")
    if type(n_heads) is not int or type(size) is not int or n_heads < 1:
        raise header.failure(f"it has {shown(n_heads)} heads of {shown(size)} features, expected two numbers")
    return (
        _granite_factors(header, config)
        | _kinds_by_heads(header, "mamba")
        | {
            "num_local_experts": config["num_experts"] or 0,
            "mamba_d_head": size // n_heads,
            "position_embedding_type": "nope" if header.get("rope.scaling.finetuned") is False else "rope",
        }
    )


def _granite_factors(header: GgufHeader, config: Config) -> Config:
    """Return Granite's scale factors. A missing or zero factor counts as 1, or as the default for attention scores."""
    head_dim, scale = config["head_dim"], header.get("attention.scale")
    usual = head_dim**-0.5 if type(head_dim) is int and head_dim > 0 else None
    return {
        "attention_multiplier": scale or usual,
        "embedding_multiplier": header.get("embedding_scale") or 1.0,
        "residual_multiplier": header.get("residual_scale") or 1.0,
        "logits_scaling": header.needed("logit_scale"),
    }


def _use_bias(header: GgufHeader, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def _seed_oss(header: GgufHeader, config: Config) -> Config:
    return {"attention_out_bias": "blk.0.attn_output.bias" in header.tensors}


def _stablelm(header: GgufHeader, config: Config) -> Config:
    """Return StableLM's fields. As in llama.cpp, a file with norms of FFNs has no parallel residual."""
    return {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _one_position(header: GgufHeader) -> None:
    if header.get("rope.dimension_sections") is not None:
        raise header.failure("it rotates by several positions (GLM-4V), which is not supported")


def _glm_4(header: GgufHeader, config: Config) -> Config:
    _one_position(header)
    if n_layers := header.get("nextn_predict_layers"):
        raise header.failure(f"it has {shown(n_layers)} layers that predict further tokens, which are not supported")
    return {}


def _glm_4_moe(header: GgufHeader, config: Config) -> Config:
    _one_position(header)
    if header.get("expert_gating_func") not in (None, SIGMOID):
        raise header.failure(f"expert_gating_func is {shown(header.get('expert_gating_func'))}, expected {SIGMOID}")
    return _said(config, UNSAID) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors}


def _deepseek(header: GgufHeader, config: Config) -> Config:
    """Return the fields of latent attention. Files with attn_k_b name cached keys' sizes where others have heads'."""
    key, value = (header.get(f"attention.{n}_length_mla") or header.get(f"attention.{n}_length") for n in KEY_VALUE)
    scores, growth = header.get("expert_gating_func"), header.get("attention.temperature_scale")
    n_turning, rope, multiplier = config["head_dim"], config["rope_scaling"], header.get(YARN_MULTIPLIER)
    if type(key) is not int or type(n_turning) is not int:
        raise header.failure(f"{shown(n_turning)} of a key's {shown(key)} features rotate, expected two numbers")
    if scores not in (None, SOFTMAX, SIGMOID) or growth:
        given = f"expert_gating_func {shown(scores)}, attention.temperature_scale {shown(growth)}"
        raise header.failure(f"its router or its queries are unlike DeepSeek's ({given}), which is not supported")
    is_biased = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    if rope["rope_type"] == "yarn" and isinstance(multiplier, float):
        rope = rope | dict.fromkeys(("mscale", "mscale_all_dim"), multiplier / 0.1)  # as the converter multiplied it
    return _said(config, UNSAID | {"q_lora_rank": 0}) | {
        "architectures": [f"DeepseekV{3 if scores == SIGMOID or (scores is None and is_biased) else 2}ForCausalLM"],
        "topk_method": "group_limited_greedy",
        "qk_nope_head_dim": key - n_turning,
        "v_head_dim": value,
        "rope_scaling": rope,
    }


def _said(config: Config, unsaid: Mapping[str, Any]) -> Config:
    """Return the fields in `unsaid`, with these values where the file has no other."""
    return {name: config[name] or value for name, value in unsaid.items()}


def _qwen_3_5(header: GgufHeader, config: Config) -> Config:
    """Return Qwen3.5's fields. Its file tiles value heads."""
    n_heads, size = config["linear_num_value_heads"], header.get("ssm.inner_size")
    has_mtp = f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight" in header.tensors
    found: Config = {TILED_FIELD: True, "mtp_num_hidden_layers": int(has_mtp)}
    if type(n_heads) is int and type(size) is int and n_heads > 0:
        found["linear_value_head_dim"] = size // n_heads
    return found


def _lfm_2(header: GgufHeader, config: Config) -> Config:
    """Return LFM2's fields. FFNs have their final size."""
    return _kinds_by_heads(header, "conv") | {"block_auto_adjust_ff_dim": False}


def _kinds_by_heads(header: GgufHeader, other: str) -> Config:
    """Return the number of key heads and the layers' types, of which those without key heads are `other`."""
    counts = header.get("attention.head_count_kv")
    if not isinstance(counts, list) or not all(type(count) is int for count in counts) or not any(counts):
        raise header.failure(f"attention.head_count_kv is {shown(counts)}, expected a number of key heads per layer")
    kinds = ["full_attention" if count else other for count in counts]
    return {"num_key_value_heads": max(counts), "layer_types": kinds}


def _nemotron_h(header: GgufHeader, config: Config) -> Config:
    """Return Nemotron-H's fields. A layer's tensors tell what it is."""
    letters = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
    n_layers, n_heads, inner = config["num_hidden_layers"], config["mamba_num_heads"], header.get("ssm.inner_size")
    if any(type(each) is not int or each < 1 for each in (n_layers, n_heads, inner)):
        raise header.failure(f"it has {shown(n_layers)} layers and {shown(n_heads)} heads of {shown(inner)} features")
    found = (
        next((letter for name, letter in letters.items() if f"blk.{n}.{name}.weight" in header.tensors), "?")
        for n in range(min(n_layers, len(header.tensors)))
    )
    return {
        "hybrid_override_pattern": (pattern := "".join(found)),
        "mamba_head_dim": inner // n_heads,
        "use_conv_bias": f"blk.{pattern.find('M')}.ssm_conv1d.bias" in header.tensors,
        "num_key_value_heads": _largest(header.each("attention.head_count_kv", n_layers)),
        "intermediate_size": _largest(header.each("feed_forward_length", n_layers)),
    }


def _largest(values: Sequence[Any]) -> int | None:
    return max((each for each in values if type(each) is int), default=0) or None


def _theta(header: GgufHeader) -> Any:
    value = header.get(THETA)
    return DEFAULT_THETA if value is None else value


def _one_theta(header: GgufHeader) -> Config:
    if header.get(NEAR_THETA) not in (None, _theta(header)):
        raise header.failure(f"{header.architecture}.{NEAR_THETA} is not {THETA}, which is not supported")
    return {}


def _pattern(header: GgufHeader, every: int) -> Config:
    """Return the layers' types if the file has a flag per layer. A single number must be the family's default."""
    pattern = header.get(PATTERN)
    if isinstance(pattern, list) and all(isinstance(flag, bool) for flag in pattern):
        return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in pattern]}
    if pattern not in (None, every):
        raise header.failure(
            f"{header.architecture}.{PATTERN} is {shown(pattern)}, expected {every} or a flag per layer"
        )
    return {}


def _query_scalar(config: Config, n_layers_of_27b: int) -> Config:
    """Return the scale of queries, which no key holds: the head size, in 27B models hidden size / number of heads."""
    is_27b = config["num_hidden_layers"] == n_layers_of_27b
    return {"query_pre_attn_scalar": head_share(config) if is_27b else config["head_dim"]}


def _qwen_3_moe(header: GgufHeader, config: Config) -> Config:
    """Return the fields of Qwen's experts, whose weights are divided by their sum, as no key says."""
    return {"intermediate_size": header.get("feed_forward_length"), "norm_topk_prob": True}


def _qwen_3_5_moe(header: GgufHeader, config: Config) -> Config:
    return _qwen_3_5(header, config) | _qwen_3_moe(header, config)


def _qwen_3_next(header: GgufHeader, config: Config) -> Config:
    return _qwen_3_5_moe(header, config) | {TILED_FIELD: False}


def _gpt_oss(header: GgufHeader, config: Config) -> Config:
    """Return gpt-oss's fields. Its blend of frequencies begins and ends inside pairs, as no key says."""
    size = header.get("expert_feed_forward_length") or header.get("feed_forward_length")
    rope = config["rope_scaling"]
    return {
        "intermediate_size": size,
        "rope_scaling": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


_NEMOTRON_H = GgufArchitecture(
    "NemotronHForCausalLM",
    ("layer_norm_epsilon", LAYER),
    fields=NEMOTRON_FIELDS,
    more=_nemotron_h,
    names=NEMOTRON_NAMES,
    rotates_part=True,
    differs=("num_key_value_heads", "intermediate_size"),
    logarithms=(".A_log",),
)
_QWEN_3_5_MOE = GgufArchitecture(
    "Qwen3_5MoeForCausalLM",
    fields=LINEAR | QWEN_EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    more=_qwen_3_5_moe,
    names=LINEAR_NAMES | FUSED,
    rotates_part=True,
    differs=("intermediate_size",),
    logarithms=(".A_log",),
)
# By general.architecture. Mistral's files use llama.
ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", is_interleaved=True, has_rope_factors=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", has_rope_factors=True),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", has_rope_factors=True),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM",
        fields=LINEAR,
        more=_qwen_3_5,
        names=LINEAR_NAMES,
        rotates_part=True,
        logarithms=(".A_log",),
    ),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM",
        fields=QWEN_EXPERTS,
        more=_qwen_3_moe,
        names=FUSED,
        has_rope_factors=True,
        differs=("intermediate_size",),
    ),
    "qwen35moe": _QWEN_3_5_MOE,
    "qwen3next": replace(_QWEN_3_5_MOE, hf_class="Qwen3NextForCausalLM", more=_qwen_3_next),
    "deepseek2": GgufArchitecture(
        "DeepseekV3ForCausalLM", fields=DEEPSEEK_FIELDS, more=_deepseek, names=ROUTED_NAMES, is_latent=True
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        fields=ROUTED | {"first_k_dense_replace": "leading_dense_block_count"},
        more=_glm_4_moe,
        names=AFTER_ATTENTION | ROUTED_NAMES,
        rotates_part=True,
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        fields=EXPERTS,
        more=_gpt_oss,
        names=AFTER_ATTENTION | {"mlp.router": "ffn_gate_inp"},
        differs=("intermediate_size",),
    ),
    "lfm2": GgufArchitecture(
        "Lfm2ForCausalLM",
        ("norm_eps", RMS[1]),
        fields={"conv_L_cache": "shortconv.l_cache"},
        more=_lfm_2,
        names=LFM_2_NAMES,
        differs=("num_key_value_heads",),
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        ("norm_eps", RMS[1]),
        fields=QWEN_EXPERTS | {"conv_L_cache": "shortconv.l_cache", "num_dense_layers": "leading_dense_block_count"},
        more=_lfm_2,
        names=LFM_2_NAMES | LFM_2_EXPERTS,
        differs=("num_key_value_heads",),
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "phi3": GgufArchitecture("Phi3ForCausalLM", rotates_part=True, has_rope_factors=True),
    "gemma": GgufArchitecture("GemmaForCausalLM"),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", fields=CAPS, more=_gemma_2, names=AFTER_ATTENTION),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", fields=CAPS, more=_gemma_3, names=AFTER_ATTENTION),
    "gemma4": GgufArchitecture(
        "Gemma4ForCausalLM",
        fields=GEMMA_4_FIELDS,
        more=_gemma_4,
        names=AFTER_ATTENTION | GEMMA_4_NAMES,
        has_rope_factors=True,
        differs=("num_key_value_heads", "intermediate_size"),
    ),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", more=_mistral_3, is_interleaved=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", more=_olmo, names=AFTER_ATTENTION),
    "granite": GgufArchitecture("GraniteForCausalLM", more=_granite, is_interleaved=True, has_rope_factors=True),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        fields=GRANITE_HYBRID_FIELDS,
        more=_granite_hybrid,
        names=GRANITE_HYBRID_NAMES,
        is_interleaved=True,
        differs=("num_key_value_heads",),
        logarithms=(".A_log",),
    ),
    "starcoder2": GgufArchitecture("Starcoder2ForCausalLM", ("norm_epsilon", LAYER), more=_use_bias),
    "stablelm": GgufArchitecture("StableLmForCausalLM", ("layer_norm_eps", LAYER), more=_stablelm, rotates_part=True),
    "glm4": GgufArchitecture("Glm4ForCausalLM", more=_glm_4, rotates_part=True),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", is_interleaved=True),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", more=_seed_oss, names=AFTER_ATTENTION),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", more=_use_bias),
}
