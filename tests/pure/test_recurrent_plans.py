"""Plans of models with recurrent layers: devices that can compute them, and the lengths that rates hold for."""

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.gpu_recurrent import GpuRecurrentCache
from hetero_ee.layers.state import RecurrentState
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.context import LONGEST_PREDICTED_TOKENS
from hetero_ee.planning.limits import Limits
from hetero_ee.planning.plan import Plan
from hetero_ee.planning.planner import plan
from hetero_ee_profiles.reference import reference_profile
from tests.families import config_of

PROFILE = reference_profile("rtx-4060-laptop-8gb")
KINDS = ("conv", "conv", "full_attention", "conv")
LFM2 = read_spec(
    {
        "model_type": "lfm2",
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": len(KINDS),
        "num_attention_heads": 16,
        "vocab_size": 65536,
        "layer_types": list(KINDS),
    }
)


MAMBA = read_spec(config_of("nemotron-h"))


def planned(spec: ModelSpec, **limits: object) -> Plan:
    return plan(spec, PROFILE, Limits(context_tokens=128, **limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [LFM2, MAMBA], ids=["lfm2", "nemotron-h"])
def test_recurrent_layers_are_planned_for_the_gpu(spec: ModelSpec) -> None:
    """With the bytes of their state, which are those that the GPU's cache allocates."""
    made, state = planned(spec, gpu_layers=99), spec.layer(0).mixer.state
    assert {part.decode_placement for part in made.parts if part.layer is not None} == {"gpu"}
    assert isinstance(state, RecurrentState)
    cache = GpuRecurrentCache(state, 64, torch.device("cpu"), [0])
    assert cache.n_bytes - cache.pool.bases.nbytes == state.n_bytes(64, "fp16") == made.parts[1].kv_bytes


@pytest.mark.parametrize("model", ["qwen3.5-0.8b", "llama-3.1-8b"])
def test_rates_are_predicted_for_a_length_that_texts_reach(model: str) -> None:
    """Half of a long context is far more than most texts have."""
    spec = known_spec(model)
    chosen = plan(spec, PROFILE, Limits(gpu_layers=0))
    assert chosen.context_tokens > 2 * LONGEST_PREDICTED_TOKENS
    assert chosen.prediction.context_tokens == LONGEST_PREDICTED_TOKENS
    asked = plan(spec, PROFILE, Limits(gpu_layers=0, context_tokens=1024))
    assert asked.prediction.context_tokens == 512
