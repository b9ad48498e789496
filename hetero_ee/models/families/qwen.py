"""Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388): Llama with biases or norms of queries and keys."""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.models.families import llama
from hetero_ee.models.families.family import layer_count
from hetero_ee.models.families.mistral import read_window
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES_3 = llama.TENSOR_NAMES | {
    "layers.{n}.attention.query_norm": ("model.layers.{n}.self_attn.q_norm",),
    "layers.{n}.attention.key_norm": ("model.layers.{n}.self_attn.k_norm",),
}


def read_spec_2(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=32, max_position_embeddings=32768)
    spec = replace(llama.read_spec(fields, architecture), sliding_windows=_sliding_windows(fields))
    return replace(spec, qkv_bias=True, attention_output_bias=False, ffn_bias=False)


def read_spec_3(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=32, max_position_embeddings=32768)
    spec = llama.read_spec(fields, architecture)
    return replace(spec, ffn_bias=False, qk_norm=True, sliding_windows=_sliding_windows(fields))


def _sliding_windows(fields: Fields) -> tuple[int | None, ...]:
    """The layers from max_window_layers on may have a window, or layer_types names each layer's kind."""
    n_layers = layer_count(fields)
    if not fields.flag("use_sliding_window", False):
        return (None,) * n_layers
    window = read_window(fields)
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
