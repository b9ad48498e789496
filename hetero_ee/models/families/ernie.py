"""ERNIE 4.5, dense (Baidu): Llama with adjacent features of a head rotating together."""

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    bias = fields.flag("use_bias", False)
    fields = fields.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    )
    return llama.read_spec(fields.with_values(attention_bias=bias, mlp_bias=bias), architecture, interleaved=True)
