"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786).

Their checkpoints store norms' scales minus 1.
"""

import math
from dataclasses import replace

from hetero_ee.models.families import llama, qwen
from hetero_ee.models.families.family import FULL, SLIDING, layer_count, read_layer_kinds, sliding_windows
from hetero_ee.models.families.mistral import read_window
from hetero_ee.models.families.rope_fields import of_layer_kind
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

POST_NORMS = {
    "layers.{n}.attention.post_norm": ("model.layers.{n}.post_attention_layernorm",),
    "layers.{n}.ffn.norm": ("model.layers.{n}.pre_feedforward_layernorm",),
    "layers.{n}.ffn.post_norm": ("model.layers.{n}.post_feedforward_layernorm",),
}
TENSOR_NAMES_2 = llama.TENSOR_NAMES | POST_NORMS
TENSOR_NAMES_3 = qwen.TENSOR_NAMES_3 | POST_NORMS
TANH = "gelu_pytorch_tanh"


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    """Read Gemma 1, whose files mean gelu's approximation by gelu."""
    act = fields.get("hidden_activation", fields.get("hidden_act", TANH))
    return _read(
        fields.with_values(hidden_act=TANH if act == "gelu" else act),
        architecture,
        {"num_key_value_heads": 16, "max_position_embeddings": 8192},
    )


def read_spec_2(fields: Fields, architecture: str) -> ModelSpec:
    """Read Gemma 2, whose layers alternate between a window and all positions."""
    kinds = read_layer_kinds(fields, [FULL if layer % 2 else SLIDING for layer in range(layer_count(fields))])
    spec = _read_later(fields, architecture, 8192)
    return replace(
        spec,
        sliding_windows=sliding_windows(kinds, read_window(fields)),
        attention_cap=_unless_null(fields, "attn_logit_softcapping", 50.0),
        logit_cap=_unless_null(fields, "final_logit_softcapping", 30.0),
    )


def read_spec_3(fields: Fields, architecture: str) -> ModelSpec:
    """Read Gemma 3, of which every sixth layer sees all positions, with its own rotary angles."""
    every = fields.integer("sliding_window_pattern", 6)
    default = [SLIDING if (layer + 1) % every else FULL for layer in range(layer_count(fields))]
    kinds = read_layer_kinds(fields, default)
    thetas = {
        FULL: fields.number("rope_theta", 1e6),
        SLIDING: fields.number("rope_local_base_freq", 1e4),
    }
    full, near = (
        _read_later(of_layer_kind(fields, kind, theta), architecture, 131072) for kind, theta in thetas.items()
    )
    return replace(
        full,
        qk_norm=True,
        sliding_windows=sliding_windows(kinds, read_window(fields)),
        layer_ropes=tuple(full.rope if kind == FULL else near.rope for kind in kinds),
        logit_cap=fields.number("final_logit_softcapping", 0.0),
    )


def _read_later(fields: Fields, architecture: str, context_tokens: int) -> ModelSpec:
    """Read the fields that Gemma 2 and 3 share."""
    fields.refuse_flag("use_bidirectional_attention", "attention to later tokens")
    fields = fields.with_values(hidden_act=fields.get("hidden_activation", TANH))
    sizes = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
    spec = _read(fields, architecture, sizes | {"max_position_embeddings": context_tokens})
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if not scalar:
        raise fields.fail("query_pre_attn_scalar is 0, expected a number above 0.")
    return replace(spec, post_norm=True, attention_scale=scalar**-0.5)


def _read(fields: Fields, architecture: str, defaults: dict[str, int]) -> ModelSpec:
    fields = fields.with_defaults(head_dim=256, tie_word_embeddings=True, **defaults)
    spec = llama.read_spec(fields.with_values(mlp_bias=None), architecture)
    return replace(spec, norm_offset=1.0, embedding_scale=math.sqrt(spec.hidden_size))


def _unless_null(fields: Fields, name: str, default: float) -> float:
    """Return 0 for null, which means no cap; a missing field means the class's default."""
    return 0.0 if fields.is_null(name) else fields.number(name, default)
