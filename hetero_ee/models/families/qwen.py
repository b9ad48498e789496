"""Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv 2505.09388): Llama with biases, or with norms of queries and keys."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.families.family import FULL, SLIDING, layer_count, read_layer_kinds, sliding_windows
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


def read_spec_2_5_vl(fields: Fields, architecture: str) -> ModelSpec:
    """Read Qwen2.5-VL's text part (arXiv 2502.13923); a text's three positions are equal, so it rotates as usual."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.section(name)
        if rope.get("mrope_section") is not None:
            kinds = {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
            fields = fields.with_values(**{name: rope.values() | kinds | {"mrope_section": None}})
    return read_spec_2(fields, architecture)


def read_spec_3(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=32, max_position_embeddings=32768)
    spec = llama.read_spec(fields, architecture)
    return replace(spec, ffn_bias=False, qk_norm=True, sliding_windows=_sliding_windows(fields))


def _sliding_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the windows: layers from max_window_layers on may have one, or layer_types names each layer's kind."""
    n_layers = layer_count(fields)
    if not fields.flag("use_sliding_window", False):
        return (None,) * n_layers
    window = read_window(fields)
    first = fields.number("max_window_layers", 28)
    default = [SLIDING if layer >= first else FULL for layer in range(n_layers)]
    return sliding_windows(read_layer_kinds(fields, default), window)
