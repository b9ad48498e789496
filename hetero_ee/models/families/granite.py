"""Granite 3 and 4 (IBM, dense): Llama with four factors."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    scaling = fields.number("logits_scaling", 1.0)
    if not scaling:
        raise fields.fail("logits_scaling is 0, expected a number above 0.")
    return replace(
        llama.read_spec(fields, architecture),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1 / scaling,
    )
