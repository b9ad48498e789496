"""A model with soft caps, norms after its blocks and windows in turns: its store, and exact mode is full mode."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.weights.checkpoint import Checkpoint
from tests.e2e.test_exact_identity import Models, check_case
from tests.exact_cases import Case
from tests.families import random_model, save_checkpoint

N_TOKENS = 24
CASE = Case(7, "gemma2", "codebook", False, "exit", 4, 0.5, "threshold", True, "temperature", 3, "length")
CASES = {
    "exits": CASE,
    "split": replace(CASE, is_split=True, is_async=True, sampling="greedy"),
    "sources": replace(CASE, drafts="n-grams and oracle", rule="always", sampling="all"),
}


@pytest.fixture(scope="module")
def models(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    model = random_model("gemma2", vocab_size=read_spec(demo).vocab_size, num_hidden_layers=4)
    opened = Models({"gemma2": save_checkpoint(model, tmp_path_factory.mktemp("gemma2"), demo)})
    yield opened
    opened.close()


@pytest.mark.parametrize("name", CASES)
def test_exact_mode_gives_the_texts_of_full_mode(name: str, models: Models) -> None:
    counts = check_case(CASES[name], models, N_TOKENS)
    assert counts.n_passes and counts.n_tokens


def test_a_store_keeps_what_the_checkpoint_says(models: Models) -> None:
    """Norms whole, with their 1; the engine's weights are the store's."""
    weights, folder = models.engine(CASE).executor.weights, models._folders["gemma2"]
    checkpoint = Checkpoint(folder, read_spec(folder))
    raw = checkpoint._raw("model.layers.1.post_feedforward_layernorm.weight")
    assert torch.equal(weights.vectors["layers.1.ffn.post_norm"], raw + 1)
    for name, values in weights.vectors.items():
        assert torch.equal(values, checkpoint.tensor(name))
