"""Configurations by the hundred thousand: refused by a ModelError of one line, or possible models."""

import random
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.errors import ModelError
from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from tests.families import FAMILIES
from tests.fuzz.mutation import mutated

MAX_BLOCKS = 2_003  # of the deepest model: embedding, 1000 times attention and FFN, final norm, head


def check_config(folder: Path, data: bytes) -> bool:
    """Whether the configuration is accepted."""
    (folder / "config.json").write_bytes(data)
    try:
        spec = read_spec(folder)
    except ModelError as error:
        assert str(error).isprintable() and len(str(error)) < 800 and str(folder) in str(error)
        return False
    blocks = decoder_blocks(spec)
    assert len(blocks) <= MAX_BLOCKS and len(spec.sliding_windows) == spec.n_layers
    assert all(size > 0 for tensor in all_tensors(blocks[:4]) for size in tensor.shape)
    assert spec.n_heads % spec.n_kv_heads == 0
    if spec.rope and spec.rope.n_features < 2**12:
        assert all(0 <= frequency < 1e9 for frequency in spec.rope.inverse_frequencies())
    return True


def fuzz(seeds: range, folder: Path) -> int:
    """How many of the inputs were good ones."""
    n_accepted = 0
    for seed in seeds:
        rng = random.Random(seed)
        prefix, values = FAMILIES[rng.choice(sorted(FAMILIES))]
        body: dict[str, Any] = {"architectures": [f"{prefix}ForCausalLM"], **values}
        data = mutated(body, rng)
        try:
            n_accepted += check_config(folder, data)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {data!r}: {error!r}") from error
    return n_accepted


def test_two_thousand_configurations(memory_folder: Path) -> None:
    assert 200 < fuzz(range(2_000), memory_folder) < 1_900


@pytest.mark.slow
def test_a_million_configurations(memory_folder: Path) -> None:
    assert fuzz(range(10**6), memory_folder) > 100_000
