"""Starcoder2 (arXiv 2402.19173): LayerNorm, biases everywhere, an FFN of two matrices, a sliding window."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

TENSOR_NAMES = llama.TENSOR_NAMES | {
    "layers.{n}.ffn.up": ("model.layers.{n}.mlp.c_fc",),
    "layers.{n}.ffn.down": ("model.layers.{n}.mlp.c_proj",),
}


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(
        num_key_value_heads=2,
        max_position_embeddings=4096,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )
    bias = fields.flag("use_bias", True)
    spec = llama.read_spec(fields.with_values(attention_bias=bias, mlp_bias=bias), architecture)
    windows = (fields.optional_integer("sliding_window"),) * spec.n_layers
    return replace(
        spec, norm="layer", norm_eps=fields.number("norm_epsilon", 1e-5), gated=False, sliding_windows=windows
    )
