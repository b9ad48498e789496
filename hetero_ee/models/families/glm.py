"""GLM-4 (arXiv 2406.12793): Llama with half of each head rotating, adjacent features together; the models of April 2025
also have norms after attention and FFN."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = llama.TENSOR_NAMES | {"layers.{n}.ffn.gate_up": ("model.layers.{n}.mlp.gate_up_proj",)}
TENSOR_NAMES_4 = TENSOR_NAMES | {
    "layers.{n}.attention.post_norm": ("model.layers.{n}.post_self_attn_layernorm",),
    "layers.{n}.ffn.post_norm": ("model.layers.{n}.post_mlp_layernorm",),
}


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
        partial_rotary_factor=0.5,
        attention_bias=True,
    )
    spec = llama.read_spec(fields, architecture, rotates_part=True, interleaved=True)
    return replace(spec, attention_output_bias=False, ffn_bias=False)


def read_spec_4(fields: Fields, architecture: str) -> ModelSpec:
    return replace(read_spec(fields, architecture), post_norm=True)
