"""Rotary frequencies against transformers' own."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee.layers.rope import RopeScaling, RopeSpec
from hetero_ee.models.context_limit import warn_of_context
from hetero_ee.ops.arena import Arena

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
    "max_position_embeddings": 8192,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
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
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    YARN,
    YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 40.0, "beta_slow": 2},
    YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    YARN | {"mscale": 0.707, "mscale_all_dim": 0},  # one alone says nothing
    YARN | {"attention_factor": 1.25, "truncate": False},
    YARN | {"truncate": None, "finetuned": True},  # as YaRN's own checkpoints have it, and null as false
    YARN | {"beta_fast": 4, "beta_slow": 4, "original_max_position_embeddings": 100},
    YARN | {"beta_fast": 500.0, "beta_slow": 300.0, "original_max_position_embeddings": 20},  # no pair is as fast
    YARN | {"beta_fast": 0, "beta_slow": 0, "factor": 1.0},  # as if they were missing
    YARN | {"factor": None, "original_max_position_embeddings": 1000},  # the ratio of both contexts
]


def their_frequencies(config: Any, context_tokens: int | None = None) -> tuple[torch.Tensor, float]:
    """Frequencies and magnitude."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        frequencies, magnitude = embedding.compute_default_rope_parameters(config)
    else:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), context_tokens)
    return torch.as_tensor(frequencies).double(), magnitude


def check_frequencies(values: dict[str, Any], context_tokens: int = 0) -> None:
    config = transformers.LlamaConfig(**copy.deepcopy(values))
    spec = read_spec(values | {"architectures": ["LlamaForCausalLM"]})
    assert spec.rope is not None
    ours = torch.tensor(spec.rope.inverse_frequencies(context_tokens), dtype=torch.float64)
    theirs, magnitude = their_frequencies(config, context_tokens or None)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=0)
    assert spec.rope.scaling.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values())))
@pytest.mark.parametrize("head_dim", [64, 12, 4, 2])
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    if rope["rope_type"] == "dynamic" and head_dim == 2:
        pytest.skip("transformers divides by zero")
    check_frequencies(SIZES | {"head_dim": head_dim, "rope_parameters": rope})
    theta = {"rope_theta": rope["rope_theta"]}
    older = {"type" if name == "rope_type" else name: value for name, value in rope.items() if name not in theta}
    check_frequencies(SIZES | theta | {"head_dim": head_dim, "rope_scaling": older})


LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 8.0]}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 1.0},
        {"rope_type": "longrope", "original_max_position_embeddings": 1000, **LONG_FACTORS},
    ],
    ids=["dynamic", "dynamic by the context alone", "longrope"],
)
@pytest.mark.parametrize("context_tokens", [1, 1000, 1001, 8192, 8193, 100_000])
def test_a_longer_context_is_stretched_as_a_prompt_that_fills_it(rope: dict[str, Any], context_tokens: int) -> None:
    values = SIZES | {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4} | rope}
    check_frequencies(values, context_tokens)
    turning = read_spec(values | {"architectures": ["LlamaForCausalLM"]}).rope
    assert turning is not None
    fixed, expected = turning.for_context(context_tokens), turning.inverse_frequencies(context_tokens)
    assert all(fixed.inverse_frequencies(other) == expected for other in (0, 1, 1000, 10**6))
    assert fixed.scaling.magnitude == turning.scaling.magnitude


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_other_kinds_turn_the_same_in_every_context(kind: str) -> None:
    rope = next(rope for rope in ROPES if rope["rope_type"] == kind)
    spec = read_spec(SIZES | {"rope_parameters": rope, "architectures": ["LlamaForCausalLM"]})
    assert spec.rope is not None
    assert spec.rope.inverse_frequencies(10**6) == spec.rope.inverse_frequencies()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_every_device_has_one_table_for_a_context(kind: str) -> None:
    from hetero_ee_cpu_ops.attention.rope import Rope

    pairs = {"short_factor": [1.0] * 32, "long_factor": [3.0] * 32} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 8192, **pairs}
    spec = read_spec(SIZES | {"rope_parameters": rope, "architectures": ["LlamaForCausalLM"]})
    assert spec.rope is not None
    for n_positions in (8192, 9000):
        on_cpu = Rope(spec.rope.inverse_frequencies(n_positions), spec.rope.scaling.magnitude)
        on_cpu._grow(n_positions)
        cache = GpuKvCache((1, spec.n_kv_heads, spec.head_dim), n_positions, torch.device("cpu"), kind="fp16")
        assert torch.equal(torch.from_numpy(on_cpu._table), Arena(spec, cache).rope_tables[spec.rope])


def own_context(rope: dict[str, Any]) -> tuple[int, str]:
    """The model's context, and what is said of ten times as much."""
    spec, told = read_spec(SIZES | {"rope_parameters": rope, "architectures": ["LlamaForCausalLM"]}), list[str]()
    warn_of_context(spec, spec.max_context_tokens, told.append)
    assert not told
    warn_of_context(spec, 10 * spec.max_context_tokens, told.append)
    assert len(told) == 1
    return spec.max_context_tokens, told[0]


def test_the_context_of_a_model_whose_positions_stretch() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 16.0}
    pairs = {name: [1.0] * 32 for name in LONG_FACTORS}
    assert own_context(YARN)[0] == 8192 == own_context({**YARN, "original_max_position_embeddings": 100})[0]
    assert own_context({**YARN, "original_max_position_embeddings": 8192})[0] == 4 * 8192  # as Qwen2.5's file has it
    assert own_context({"rope_type": "yarn", "factor": 4.0})[0] == 8192  # stretched from an unknown one
    assert own_context(dynamic)[0] == 8192 and "(dynamic)" in own_context(dynamic)[1]
    assert "quality may degrade" in own_context(dynamic | {"factor": 8.0})[1]
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 512} | pairs
    assert own_context(longrope)[0] == 512 and "(longrope)" in own_context(longrope)[1]


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
    "yarn, no original context": {"rope_scaling": {"type": "yarn", "factor": 8.0}},
    "yarn, original context inside": {
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40}
    },
    "yarn, original context outside": {
        "rope_scaling": {"type": "yarn", "factor": 8.0},
        "original_max_position_embeddings": 40,
    },
    "dynamic, original context outside": {
        "rope_scaling": {"type": "dynamic", "factor": 8.0},
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
