"""Seed-OSS (ByteDance): Llama with biases of queries, keys and values, and optionally of the output."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(
        num_key_value_heads=8, head_dim=128, max_position_embeddings=524288, attention_bias=True
    )
    spec = llama.read_spec(fields, architecture)
    return replace(spec, attention_output_bias=fields.flag("attention_out_bias", False))
