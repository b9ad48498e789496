"""A model with soft caps, norms after its blocks and windows in turns: its store, and exact mode is full mode.

So are models with experts, with recurrent layers and without.
"""

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
    vocab_size = read_spec(demo).vocab_size
    changes = {
        "gemma2": {"num_hidden_layers": 4},
        "qwen3-moe": {"num_hidden_layers": 4},
        "qwen3.5-moe": {"max_position_embeddings": 512},
        "gemma4-moe": {"max_position_embeddings": 512},
        "glm4-flash": {"max_position_embeddings": 512},
        "nemotron-h": {"max_position_embeddings": 512},
        "gemma4-e": {"vocab_size_per_layer_input": vocab_size, "max_position_embeddings": 512},
    }
    made = {name: random_model(name, vocab_size=vocab_size, **each) for name, each in changes.items()}
    opened = Models({name: save_checkpoint(model, tmp_path_factory.mktemp(name), demo) for name, model in made.items()})
    yield opened
    opened.close()


@pytest.mark.parametrize("name", CASES)
def test_exact_mode_gives_the_texts_of_full_mode(name: str, models: Models) -> None:
    counts = check_case(CASES[name], models, N_TOKENS)
    assert counts.n_passes and counts.n_tokens


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", ["exits", "sources"])
def test_layers_that_read_tokens_and_others_keys_are_exact_too(name: str, models: Models) -> None:
    counts = check_case(replace(CASES[name], model="gemma4-e"), models, N_TOKENS)
    assert counts.n_passes and counts.n_tokens


EXPERTS = {
    "exits": replace(CASE, model="qwen3-moe"),
    "sources": replace(CASES["sources"], model="qwen3-moe", activations="int16"),
    "recurrent": replace(CASES["sources"], model="qwen3.5-moe"),
    "inner norms": replace(CASE, model="gemma4-moe"),
    "latent attention": replace(CASE, model="glm4-flash"),
    "single mixers": replace(CASES["sources"], model="nemotron-h"),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_models_with_experts_are_exact_too(name: str, models: Models) -> None:
    counts = check_case(EXPERTS[name], models, N_TOKENS)
    assert counts.n_passes and counts.n_tokens


def test_a_store_keeps_what_the_checkpoint_says(models: Models) -> None:
    """Norms whole, with their 1; the engine's weights are the store's."""
    weights, folder = models.engine(CASE).executor.weights, models._folders["gemma2"]
    checkpoint = Checkpoint(folder, read_spec(folder))
    raw = checkpoint._raw("model.layers.1.post_feedforward_layernorm.weight")
    assert torch.equal(weights.vectors["layers.1.ffn.post_norm"], raw + 1)
    for name, values in weights.vectors.items():
        assert torch.equal(values, checkpoint.tensor(name))
