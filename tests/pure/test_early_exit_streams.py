"""A streamed layer is copied only for a token that passes it: copies counted on the emulated machine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.runtime.devices.timeline import TO_GPU, Timeline
from hetero_ee.runtime.streaming.streaming import N_BUFFERS
from hetero_ee_profiles.reference import reference_profile
from tests.emulation import LAPTOP, dummy, planned

N_LAYERS, EXIT_LAYERS = 8, (2, 4, 6)
SPEC = read_spec(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 256,
    }
)
STREAMED = range(3, N_LAYERS)  # layer 2 stays on the GPU: a token that exits after 2 needs no streamed layer
PLAN = replace(
    planned(SPEC, overrides=((r"layers\.[0-2]\..*", "gpu"), (r"layers\.[3-7]\..*", "stream")), context_tokens=256),
    mode="specee",
    drafts=None,
    exit_layer=None,
    exit_layers=EXIT_LAYERS,
)
depths = st.lists(st.sampled_from((*EXIT_LAYERS, N_LAYERS)), min_size=1, max_size=20)


def copied_after(depths_of: list[int]) -> list[str]:
    """What is copied for tokens that pass so many layers each, from exit layer to exit layer, and no others."""
    timeline = Timeline()
    executor = dummy(SPEC, PLAN, reference_profile(LAPTOP), timeline)
    try:
        for depth in depths_of:
            sequence, hidden = executor.cache.open_new(), None
            ends = [layer for layer in (*EXIT_LAYERS, N_LAYERS) if layer <= depth]
            for start, end in zip((0, *ends), ends, strict=False):
                hidden = executor.run(Batch((0,), (sequence,), (0,)), hidden, range(start, end))
            executor.cache.close(sequence)
        return [span.name for span in timeline.spans if span.lane == TO_GPU]
    finally:
        executor.close()


def blocks_of(depth: int) -> list[str]:
    return [f"layers.{layer}.{kind}" for layer in STREAMED if layer < depth for kind in ("attention", "ffn")]


@given(depths)
def test_no_copies_but_of_layers_that_tokens_pass(depths_of: list[int]) -> None:
    """Every block that a token passes, in order, and at the end of a whole pass the first ones for the next token."""
    ahead, expected = 0, []
    for depth in depths_of:
        needed = blocks_of(depth)
        expected += needed[ahead:]
        if needed:
            ahead = 0
        if depth == N_LAYERS:
            ahead = N_BUFFERS
            expected += blocks_of(N_LAYERS)[:ahead]
    assert copied_after(depths_of) == expected


@pytest.mark.parametrize("n_tokens", [1, 10])
def test_runs_of_the_first_layers_copy_nothing(n_tokens: int) -> None:
    assert copied_after([EXIT_LAYERS[0]] * n_tokens) == []
    assert copied_after([N_LAYERS] + [EXIT_LAYERS[0]] * n_tokens) == copied_after([N_LAYERS])
