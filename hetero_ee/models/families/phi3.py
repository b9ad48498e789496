"""Phi-3 (arXiv 2404.14219): Llama whose checkpoints stack matrices with the same input."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = llama.TENSOR_NAMES | {
    "layers.{n}.attention.qkv": ("model.layers.{n}.self_attn.qkv_proj",),
    "layers.{n}.ffn.gate_up": ("model.layers.{n}.mlp.gate_up_proj",),
}


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    spec = llama.read_spec(fields, architecture, rotates_part=True)
    windows = (fields.optional_integer("sliding_window"),) * spec.n_layers
    return replace(spec, qkv_bias=False, attention_output_bias=False, ffn_bias=False, sliding_windows=windows)
