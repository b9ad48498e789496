"""SmolLM3: Llama with some layers whose queries and keys do not rotate (NoPE, arXiv 2305.19466)."""

from dataclasses import replace

from hetero_ee.errors import shown
from hetero_ee.models.families import llama
from hetero_ee.models.families.family import FULL, SLIDING, layer_count, read_layer_kinds, sliding_windows
from hetero_ee.models.fields import Fields
from hetero_ee.models.spec import ModelSpec


def read_spec(fields: Fields, architecture: str) -> ModelSpec:
    fields = fields.with_defaults(
        num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, tie_word_embeddings=True
    )
    spec, rotates = llama.read_spec(fields, architecture), _rotating_layers(fields)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    kinds = read_layer_kinds(fields, [FULL if each else SLIDING for each in rotates])
    ropes = tuple(spec.rope if each else None for each in rotates)
    return replace(spec, sliding_windows=sliding_windows(kinds, window), layer_ropes=ropes)


def _rotating_layers(fields: Fields) -> list[int]:
    n_layers, interval = layer_count(fields), fields.integer("no_rope_layer_interval", 4)
    rotates = fields.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(n_layers)])
    if not isinstance(rotates, list | tuple) or len(rotates) < n_layers or any(each not in (0, 1) for each in rotates):
        raise fields.fail(f"no_rope_layers is {shown(rotates)}, expected a 0 or a 1 for each of {n_layers} layers.")
    return list(rotates[:n_layers])
