"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer."""

from dataclasses import replace

from hetero_ee.models.families import llama
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec

DEFAULT_WINDOW = 4096


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    with_defaults = fields.with_defaults(num_key_value_heads=8, max_position_embeddings=131072)
    spec = llama.read_spec(with_defaults, architecture)
    windows = (read_window(fields),) * spec.n_layers
    return replace(spec, qkv_bias=False, attention_output_bias=False, ffn_bias=False, sliding_windows=windows)


def read_window(fields: Fields) -> int | None:
    """Return the window: null means none; a missing field means the class's default, as in Mistral's first release."""
    return None if fields.is_null("sliding_window") else fields.integer("sliding_window", DEFAULT_WINDOW)
