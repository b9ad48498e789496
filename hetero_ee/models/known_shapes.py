"""List the shapes of well-known models, to plan for them and time them without their weights."""

from hetero_ee.errors import UsageError, shown
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.models.spec import ModelSpec

FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
# Source: the models' published config.json files.
SHAPES = {
    "tinyllama-1.1b": (2048, 5632, 22, 32, 4, 32000, 2048),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256, 8192),
}


def known_spec(name: str) -> ModelSpec:
    """Return the spec of a well-known model. Raises UsageError for an unknown name."""
    if name not in SHAPES:
        raise UsageError(f"{shown(name)} is not a model with known shapes; choose one of {', '.join(SHAPES)}.")
    return spec_from_hf({"model_type": "llama", **dict(zip(FIELDS, SHAPES[name], strict=True))}, name)
