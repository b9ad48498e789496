"""Rotary frequencies against transformers' own."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.rope import RopeScaling, RopeSpec

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
    "max_position_embeddings": 8192,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3 | {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192},  # Llama 3.1
    LLAMA3 | {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},  # Llama 3.2
    {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 2.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 300,
    },
]


def their_frequencies(config: Any) -> torch.Tensor:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        frequencies, factor = embedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert factor == 1
    return torch.as_tensor(frequencies).double()


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}-{rope['rope_theta']:g}")
@pytest.mark.parametrize("head_dim", [64, 12, 2])
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    config = transformers.LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters=rope)
    spec = read_spec(config)
    assert spec.rope is not None
    ours = torch.tensor(spec.rope.inverse_frequencies(), dtype=torch.float64)
    assert torch.allclose(ours, their_frequencies(config), rtol=1e-5, atol=0)


def test_only_a_part_of_the_features_turns() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    config = transformers.Phi3Config(**SIZES, rope_parameters=rope, pad_token_id=0)
    spec = read_spec(config)
    assert spec.rope == RopeSpec(10000.0, 48)
    embedding = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding
    theirs = torch.as_tensor(embedding.compute_default_rope_parameters(config)[0]).double()
    assert torch.allclose(torch.tensor(spec.rope.inverse_frequencies()).double(), theirs, rtol=1e-5, atol=0)


LINEAR = {"rope_type": "linear", "factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
# As config.json may have it: where a value stands twice, and where it is missing.
FILES: dict[str, dict[str, Any]] = {
    "both spellings": {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    "longrope, no original context": {"rope_scaling": LONGROPE},
    "longrope, original context inside": {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 40}},
    "longrope, original context outside": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 40},
    "longrope, both": {
        "rope_scaling": LONGROPE | {"original_max_position_embeddings": 80},
        "original_max_position_embeddings": 40,
    },
    "llama3, no original context": {"rope_scaling": LLAMA3 | {"factor": 8.0}},
    "llama3, original context outside": {
        "rope_scaling": LLAMA3 | {"factor": 8.0},
        "original_max_position_embeddings": 40,
    },
    "llama3, both": {
        "rope_scaling": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 80},
        "original_max_position_embeddings": 40,
    },
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("prefix", ["Llama", "Phi3"])
def test_values_in_several_places_are_read_as_transformers_reads_them(prefix: str, name: str) -> None:
    values = SIZES | {"hidden_size": 24, "rope_theta": 500.0} | FILES[name]
    if prefix == "Phi3" and "longrope" not in name:
        pytest.skip("transformers has no such Phi-3")
    config = getattr(transformers, f"{prefix}Config")(**copy.deepcopy(values), pad_token_id=0)
    theirs = getattr(transformers, f"{prefix}Model")(config).rotary_emb
    spec = read_spec(values | {"architectures": [f"{prefix}ForCausalLM"]})
    assert spec.rope is not None
    ours = torch.tensor(spec.rope.inverse_frequencies(), dtype=torch.float64)
    assert torch.allclose(ours, theirs.inv_freq.double(), rtol=1e-5, atol=0)
    assert spec.rope.scaling.magnitude == pytest.approx(theirs.attention_scaling)


def test_llama3_leaves_fast_turns_and_divides_slow_ones() -> None:
    plain = RopeSpec(5e5, 128).inverse_frequencies()
    scaled = RopeSpec(5e5, 128, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)).inverse_frequencies()
    for before, after in zip(plain, scaled, strict=True):
        turns = 8192 * before / (2 * math.pi)
        share = after / before
        assert share == 1 if turns > 4 else share == pytest.approx(1 / 8) if turns < 1 else 1 / 8 <= share <= 1
    assert scaled == sorted(scaled, reverse=True)
