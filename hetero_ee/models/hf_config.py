"""Reads Hugging Face configurations: the only place that knows their field names, defaults and habits."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from hetero_ee.errors import shown
from hetero_ee.models.fields import Fields
from hetero_ee.models.hf_quantization import four_bit_type
from hetero_ee.models.rope import RopeScaling, RopeSpec
from hetero_ee.models.spec import ModelSpec

MAX_LAYERS = 1000
MIN_FACTOR, MAX_FACTOR = 1e-3, 1e6  # of frequencies; published ones lie from 1 to 64


def spec_from_hf(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The numbers of a Hugging Face configuration; `where` names it in errors.

    Raises ModelError naming the field, or the architecture and what is supported.
    """
    fields = Fields(config, where)
    return _reader_for(fields)(fields)


def four_bit_type_from_hf(config: Mapping[str, Any], where: str) -> str | None:
    """The 4 bits in which bitsandbytes saved the weights; None for floats. Raises ModelError."""
    return four_bit_type(Fields(config, where))


def _reader_for(fields: Fields) -> Callable[[Fields], ModelSpec]:
    four_bit_type(fields)  # refuses weights that can't be read
    architectures = fields.get("architectures", [])
    architecture = architectures[0] if isinstance(architectures, list | tuple) and architectures else None
    model_type = fields.text("model_type", "")
    if architecture is None:
        architecture = _ARCHITECTURE_OF_TYPE.get(model_type)
    if not isinstance(architecture, str) or architecture not in _READERS:
        name = architecture or model_type or "none named"
        raise fields.fail(f"architecture {shown(name)} is not supported; supported are {', '.join(_READERS)}.")
    return _READERS[architecture]


def _llama(fields: Fields, architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelSpec:
    """Llama and its descendants; `changes` are the descendant's own switches."""
    hidden_size, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    n_layers = fields.integer("num_hidden_layers", largest=MAX_LAYERS)
    own_head_dim = changes.pop("head_dim", None)  # the class's default
    if own_head_dim is None and fields.get("head_dim") is None:
        own_head_dim = _even_head_dim(fields, hidden_size, n_heads)
    head_dim = fields.integer("head_dim", own_head_dim)
    own_kv_heads = changes.pop("n_kv_heads", n_heads)  # likewise; but a null means one for each query head
    n_kv_heads = fields.integer("num_key_value_heads", n_heads if fields.has("num_key_value_heads") else own_kv_heads)
    if n_heads % n_kv_heads:
        raise fields.fail(f"num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}.")
    context_tokens = fields.integer("max_position_embeddings", changes.pop("context_tokens", 2048))
    activation, threshold = _activation(fields, "hidden_act", "silu")
    rope = _rope(fields, head_dim, context_tokens)
    if rope.scaling.kind == "longrope":  # the short factors cover no more
        context_tokens = min(context_tokens, rope.scaling.original_context_tokens)
    attention_bias = fields.flag("attention_bias", False)
    switches: dict[str, Any] = {
        "family": "llama",
        "qkv_bias": attention_bias,
        "attention_output_bias": attention_bias,
        "ffn_bias": fields.flag("mlp_bias", False),
        "qk_norm": False,
        "sliding_windows": (None,) * n_layers,
        "tied_head": fields.flag("tie_word_embeddings", False),
        "context_is_fixed": rope.scaling.kind == "longrope",
    }
    return ModelSpec(
        architecture=architecture,
        n_layers=n_layers,
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_context_tokens=context_tokens,
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", changes.pop("norm_eps", 1e-6)),
        norm_affine=True,
        final_norm=True,
        activation=activation,
        activation_threshold=threshold,
        gated=True,
        rope=rope,
        learned_position_offset=None,
        **(switches | changes),
    )


def _even_head_dim(fields: Fields, hidden_size: int, n_heads: int) -> int:
    """The head size where none is named: heads share the hidden size evenly."""
    if hidden_size % n_heads:
        raise fields.fail(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {n_heads}.")
    return hidden_size // n_heads


def _sparse_llama(fields: Fields) -> ModelSpec:
    """ProSparse (arXiv 2402.13516): Llama whose gate is ReLU with a threshold of its own (FATReLU)."""
    return _llama(fields, "SparseLlamaForCausalLM")


def _mistral(fields: Fields) -> ModelSpec:
    window = _window(fields)
    n_layers = fields.integer("num_hidden_layers", largest=MAX_LAYERS)
    return _llama(
        fields,
        "MistralForCausalLM",
        n_kv_heads=8,
        context_tokens=131072,
        qkv_bias=False,
        attention_output_bias=False,
        ffn_bias=False,
        sliding_windows=(window,) * n_layers,
    )


def _window(fields: Fields) -> int | None:
    """A null says that there is none; a silent file means the classes' default, which Mistral's first release had."""
    is_null = fields.has("sliding_window") and fields.get("sliding_window") is None
    return None if is_null else fields.integer("sliding_window", 4096)


def _qwen2(fields: Fields) -> ModelSpec:
    return _llama(
        fields,
        "Qwen2ForCausalLM",
        n_kv_heads=32,
        context_tokens=32768,
        qkv_bias=True,
        attention_output_bias=False,
        ffn_bias=False,
        sliding_windows=_qwen_windows(fields),
    )


def _qwen3(fields: Fields) -> ModelSpec:
    return _llama(
        fields,
        "Qwen3ForCausalLM",
        head_dim=128,
        n_kv_heads=32,
        context_tokens=32768,
        ffn_bias=False,
        qk_norm=True,
        sliding_windows=_qwen_windows(fields),
    )


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen: the layers from max_window_layers on may have a window, or layer_types names each layer's kind."""
    n_layers = fields.integer("num_hidden_layers", largest=MAX_LAYERS)
    if not fields.flag("use_sliding_window", False):
        return (None,) * n_layers
    window = _window(fields)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.number("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(n_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != n_layers:
        raise fields.fail(f"layer_types is {shown(kinds)}, expected one entry for each of {n_layers} layers.")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.fail(f"layer_types names {shown(kind)}, expected full_attention or sliding_attention.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _phi3(fields: Fields) -> ModelSpec:
    n_layers = fields.integer("num_hidden_layers", largest=MAX_LAYERS)
    window = fields.integer("sliding_window") if fields.get("sliding_window") is not None else None
    return _llama(
        fields,
        "Phi3ForCausalLM",
        family="phi3",
        context_tokens=4096,
        norm_eps=1e-5,
        qkv_bias=False,
        attention_output_bias=False,
        ffn_bias=False,
        sliding_windows=(window,) * n_layers,
    )


def _opt(fields: Fields) -> ModelSpec:
    """OPT (arXiv 2205.01068): learned positions, LayerNorm, biases, two-matrix FFN."""
    hidden_size, n_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if (
        not fields.flag("do_layer_norm_before", True)
        or fields.integer("word_embed_proj_dim", hidden_size) != hidden_size
    ):
        raise fields.fail("OPT with norms after the blocks or projected embeddings (opt-350m) is not supported.")
    n_layers = fields.integer("num_hidden_layers", largest=MAX_LAYERS)
    activation, threshold = _activation(fields, "activation_function", "relu")
    bias = fields.flag("enable_bias", True)
    return ModelSpec(
        architecture="OPTForCausalLM",
        family="opt",
        n_layers=n_layers,
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=_even_head_dim(fields, hidden_size, n_heads),
        ffn_size=fields.integer("ffn_dim"),
        vocab_size=fields.integer("vocab_size"),
        max_context_tokens=fields.integer("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,  # OPT leaves torch's LayerNorm default
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        final_norm=not fields.flag("_remove_final_layer_norm", False),
        activation=activation,
        activation_threshold=threshold,
        gated=False,
        qkv_bias=bias,
        attention_output_bias=bias,
        ffn_bias=bias,
        qk_norm=False,
        rope=None,
        learned_position_offset=2,
        sliding_windows=(None,) * n_layers,
        tied_head=fields.flag("tie_word_embeddings", True),
        context_is_fixed=True,
    )


def _activation(fields: Fields, field: str, default: str) -> tuple[str, float]:
    """Our name of the activation that `field` names, and its threshold (0 where it has none)."""
    name = fields.text(field, default)
    known = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "fatrelu": "fatrelu",
    }
    if name not in known:
        raise fields.fail(f"{field} is {shown(name)}, which is not supported; supported are {', '.join(known)}.")
    return known[name], fields.number("hidden_act_param") if name == "fatrelu" else 0.0


def _rope(fields: Fields, head_dim: int, context_tokens: int) -> RopeSpec:
    """Reads both spellings: rope_parameters (transformers 5) and rope_theta with rope_scaling (before)."""
    parameters = fields.section("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    theta = parameters.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    n_features = int(head_dim * partial)
    if theta < 1:
        raise fields.fail(f"rope_theta is {theta:g}, expected 1 or more.")
    if n_features < 2 or n_features % 2 or n_features > head_dim:
        raise fields.fail(
            f"partial_rotary_factor {partial:g} of head_dim {head_dim} turns {n_features} features, "
            "expected an even number of them."
        )
    parameters.refuse_others(_ROPE_FIELDS)
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    kinds = ("default", "linear", "llama3", "longrope")
    if kind not in kinds:
        raise fields.fail(f"rope_type {shown(kind)} is not supported; supported are {', '.join(kinds)}.")
    if kind == "default":
        return RopeSpec(theta, n_features)
    if kind == "longrope":
        return RopeSpec(theta, n_features, _longrope(fields, parameters, context_tokens, n_features // 2))
    factor = parameters.number("factor")
    low, high = parameters.number("low_freq_factor", 1.0), parameters.number("high_freq_factor", 4.0)
    if factor < 1 or high <= low:
        raise fields.fail(
            f"rope factor {factor:g}, low_freq_factor {low:g} and high_freq_factor {high:g} are impossible, "
            "expected 1 or more, and the last above the second."
        )
    original_tokens = parameters.integer("original_max_position_embeddings", context_tokens)
    return RopeSpec(theta, n_features, RopeScaling(kind, factor, low, high, original_tokens))


def _longrope(fields: Fields, parameters: Fields, context_tokens: int, n_pairs: int) -> RopeScaling:
    """Phi-3's long contexts (arXiv 2402.13753). The default magnitude is the paper's, from the ratio of contexts."""
    default_tokens = parameters.integer("original_max_position_embeddings", 4096)
    original_tokens = fields.integer("original_max_position_embeddings", default_tokens, smallest=2)
    factors = parameters.get("short_factor", [])
    if not isinstance(factors, list | tuple) or len(factors) != n_pairs or not all(_is_factor(f) for f in factors):
        raise fields.fail(
            f"short_factor is {shown(factors)}, expected {n_pairs} numbers from {MIN_FACTOR:g} to {MAX_FACTOR:g}."
        )
    ratio = parameters.number("factor", context_tokens / original_tokens)
    magnitude = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original_tokens))
    return RopeScaling(
        kind="longrope",
        original_context_tokens=original_tokens,
        short_factors=tuple(float(factor) for factor in factors),
        magnitude=parameters.number("attention_factor", magnitude),
    )


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_FACTOR <= value <= MAX_FACTOR


_ROPE_FIELDS = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "short_factor",
    "long_factor",
    "attention_factor",
}
_READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "SparseLlamaForCausalLM": _sparse_llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "OPTForCausalLM": _opt,
}
_ARCHITECTURE_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "sparsellama": "SparseLlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "opt": "OPTForCausalLM",
}
