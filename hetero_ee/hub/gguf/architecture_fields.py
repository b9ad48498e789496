"""Compute the fields of config.json that no key of a GGUF file holds directly.

Source: llama.cpp's converter (conversion/) and graphs (src/models/).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.hub.gguf.header import GgufHeader
from hetero_ee.models.families.qwen3_5 import TILED_FIELD

Config = dict[str, Any]  # fields of config.json; None if the file does not have one
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
THETA, NEAR_THETA = "rope.freq_base", "rope.freq_base_swa"
DEFAULT_THETA = 10000.0
LARGEST_DIVISOR = 1e20  # of frequencies of features that rotate; llama.cpp divides the others by 1e30
MAX_PREDICTING = 16
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
KEY_VALUE, YARN_MULTIPLIER = ("key", "value"), "rope.scaling.yarn_log_multiplier"
# Values of fields whose keys a file leaves out; the families' defaults in config.json are others.
ABSENT: Config = {"n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
ABSENT |= {"routed_scaling_factor": 1.0, "norm_topk_prob": False}
GEMMA_2_27B_LAYERS, GEMMA_3_27B_LAYERS = 46, 62


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


def gemma_2(header: GgufHeader, config: Config) -> Config:
    return _one_theta(header) | _pattern(header, 2) | _query_scalar(config, GEMMA_2_27B_LAYERS)


def gemma_3(header: GgufHeader, config: Config) -> Config:
    """Return Gemma 3's rotary bases and layer types. Without a window, all layers see all positions."""
    near = header.get(NEAR_THETA)
    thetas = {"rope_theta": _theta(header), "rope_local_base_freq": DEFAULT_THETA if near is None else near}
    every = _pattern(header, 6) if header.get(WINDOW) else {"sliding_window_pattern": 1}
    return thetas | every | _query_scalar(config, GEMMA_3_27B_LAYERS)


def gemma_4(header: GgufHeader, config: Config) -> Config:
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


def mistral_3(header: GgufHeader, config: Config) -> Config:
    """Return Ministral 3's rotary scaling, which leaves magnitudes as they are, and the growth of its queries."""
    growth, rope = header.get("attention.temperature_scale"), config["rope_scaling"]
    yarn = {"mscale": 1.0, "mscale_all_dim": 1.0} if rope["rope_type"] == "yarn" else {}
    return {"rope_scaling": rope | yarn | ({"llama_4_scaling_beta": growth} if growth else {})}


def olmo(header: GgufHeader, config: Config) -> Config:
    """Return the fields of OLMo 3 if the file has a window, else none: OLMo 2 and 3 share an architecture name."""
    if not header.get(WINDOW):
        return {}
    thetas = _one_theta(header) | {"rope_theta": _theta(header)}
    return {"architectures": ["Olmo3ForCausalLM"]} | thetas | _pattern(header, 4)


def granite(header: GgufHeader, config: Config) -> Config:
    if header.get("rope.scaling.finetuned") is False:
        raise header.failure("its heads do not rotate (rope.scaling.finetuned is false), which is not supported")
    return _granite_factors(header, config)


def granite_hybrid(header: GgufHeader, config: Config) -> Config:
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


def use_bias(header: GgufHeader, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def seed_oss(header: GgufHeader, config: Config) -> Config:
    return {"attention_out_bias": "blk.0.attn_output.bias" in header.tensors}


def stablelm(header: GgufHeader, config: Config) -> Config:
    """Return StableLM's fields. As in llama.cpp, a file with norms of FFNs has no parallel residual."""
    return {
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _one_position(header: GgufHeader) -> None:
    if header.get("rope.dimension_sections") is not None:
        raise header.failure("it rotates by several positions (GLM-4V), which is not supported")


def glm_4(header: GgufHeader, config: Config) -> Config:
    _one_position(header)
    if n_layers := header.get("nextn_predict_layers"):
        raise header.failure(f"it has {shown(n_layers)} layers that predict further tokens, which are not supported")
    return {}


def glm_4_moe(header: GgufHeader, config: Config) -> Config:
    _one_position(header)
    if header.get("expert_gating_func") not in (None, SIGMOID):
        raise header.failure(f"expert_gating_func is {shown(header.get('expert_gating_func'))}, expected {SIGMOID}")
    return _given_or(config, ABSENT) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors}


def deepseek(header: GgufHeader, config: Config) -> Config:
    """Return the fields of latent attention.

    In files with attn_k_b, attention.key_length is the size of cached keys, and key_length_mla that of heads' keys.
    """
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
    return _given_or(config, ABSENT | {"q_lora_rank": 0}) | {
        "architectures": [f"DeepseekV{3 if scores == SIGMOID or (scores is None and is_biased) else 2}ForCausalLM"],
        "topk_method": "group_limited_greedy",
        "qk_nope_head_dim": key - n_turning,
        "v_head_dim": value,
        "rope_scaling": rope,
    }


def _given_or(config: Config, absent: Mapping[str, Any]) -> Config:
    """Return the fields in `absent`: the file's values, or those of `absent` for keys that it leaves out."""
    return {name: config[name] or value for name, value in absent.items()}


def qwen_3_5(header: GgufHeader, config: Config) -> Config:
    """Return Qwen3.5's fields. Its file tiles value heads."""
    n_heads, size = config["linear_num_value_heads"], header.get("ssm.inner_size")
    has_mtp = f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight" in header.tensors
    found: Config = {TILED_FIELD: True, "mtp_num_hidden_layers": int(has_mtp)}
    if type(n_heads) is int and type(size) is int and n_heads > 0:
        found["linear_value_head_dim"] = size // n_heads
    return found


def lfm_2(header: GgufHeader, config: Config) -> Config:
    """Return LFM2's fields. FFNs have their final size."""
    return _kinds_by_heads(header, "conv") | {"block_auto_adjust_ff_dim": False}


def _kinds_by_heads(header: GgufHeader, other: str) -> Config:
    """Return the number of key heads and the layers' types, of which those without key heads are `other`."""
    counts = header.get("attention.head_count_kv")
    if not isinstance(counts, list) or not all(type(count) is int for count in counts) or not any(counts):
        raise header.failure(f"attention.head_count_kv is {shown(counts)}, expected a number of key heads per layer")
    kinds = ["full_attention" if count else other for count in counts]
    return {"num_key_value_heads": max(counts), "layer_types": kinds}


def nemotron_h(header: GgufHeader, config: Config) -> Config:
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


def qwen_3_moe(header: GgufHeader, config: Config) -> Config:
    """Return the fields of Qwen's experts, whose weights are divided by their sum, as no key says."""
    return {"intermediate_size": header.get("feed_forward_length"), "norm_topk_prob": True}


def qwen_3_5_moe(header: GgufHeader, config: Config) -> Config:
    return qwen_3_5(header, config) | qwen_3_moe(header, config)


def qwen_3_next(header: GgufHeader, config: Config) -> Config:
    return qwen_3_5_moe(header, config) | {TILED_FIELD: False}


def gpt_oss(header: GgufHeader, config: Config) -> Config:
    """Return gpt-oss's fields. Its blend of frequencies begins and ends inside pairs, as no key says."""
    size = header.get("expert_feed_forward_length") or header.get("feed_forward_length")
    rope = config["rope_scaling"]
    return {
        "intermediate_size": size,
        "rope_scaling": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }
