"""Helium (Kyutai): Llama with adjacent features of a head rotating together."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(
        num_key_value_heads=20, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-8, rope_theta=1e5
    )
    spec = llama.read_spec(fields, architecture, interleaved=True)
    if spec.query_size != spec.hidden_size:
        raise fields.fail(
            f"num_attention_heads {spec.n_heads} of head_dim {spec.head_dim} are not hidden_size {spec.hidden_size}, "
            "as this architecture needs."
        )
    return replace(spec, attention_output_bias=False)
