"""Contexts of many thousand tokens: a random model against transformers, and the CPU kernels against the reference, at
positions up to the last; sliding windows, chunks and every kind of keys and values."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_ee.engine import Engine
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import KINDS, CpuKvCache
from hetero_ee.layers.rope import RopeSpec
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.planning.limits import Limits
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.weights.checkpoint import Checkpoint
from hetero_ee.weights.model_weights import load_dense
from hetero_ee_profiles.reference import reference_profile
from tests.e2e.test_cpu_executor import tiled
from tests.e2e.test_families import reference_greedy
from tests.families import random_model, save_checkpoint

TOLERANCE = 1e-4  # of the largest logit, as in short texts
# Normalised, squared, of int8 activations and of int8 keys that they move over an edge; OffByOne makes 0.36 and more.
CPU_ERROR = {"fp32": 1e-2, "fp16": 1e-2, "int8": 2e-2}
SHARPER = 2.0  # queries and keys: a token's attention is then on a few others, near or far
CHUNK_TOKENS = 256
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all positions": ("llama", {}),
    "a window": ("mistral", {"sliding_window": 500}),
    "yarn": ("llama", {"rope_parameters": YARN}),
}
LENGTHS = [1_300, pytest.param(32_768, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model and its checkpoint."""
    family, changes = MODELS[request.param]
    made = random_model(family, num_hidden_layers=2, max_position_embeddings=32_768, **changes)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight *= SHARPER
            layer.self_attn.k_proj.weight *= SHARPER
    return made, save_checkpoint(made, tmp_path_factory.mktemp("long"))


def text(n_tokens: int) -> list[int]:
    return torch.randint(0, 131, (n_tokens,), generator=torch.Generator().manual_seed(0)).tolist()


def wanted(n_tokens: int) -> list[int]:
    """Positions that are compared: all over the text, and its last."""
    return [*range(0, n_tokens, 331), n_tokens - 1]


@torch.no_grad()
def their_logits(model: Any, token_ids: list[int]) -> Tensor:
    """transformers', by chunks: of a whole text its attention would take gigabytes."""
    from transformers import DynamicCache

    cache, found = DynamicCache(config=model.config), []
    for first in range(0, len(token_ids), 1024):
        chunk = torch.tensor([token_ids[first : first + 1024]])
        found.append(model(chunk, past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(found)[wanted(len(token_ids))]


def our_logits(executor: Executor, token_ids: list[int], chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    places, found = set(wanted(len(token_ids))), []
    executor.cache.open(0)
    for first in range(0, len(token_ids), chunk_tokens):
        batch = Batch.of_sequence(0, first, token_ids[first : first + chunk_tokens])
        hidden = executor.hidden(batch)
        if rows := [row for row, position in enumerate(batch.positions) if position in places]:
            found.append(executor.to_logits(hidden[rows]))
    executor.cache.close(0)
    return torch.cat(found)


class OffByOne(BatchedTorchOps):
    """The late half of the text turns as if it were one position further."""

    def __init__(self, n_tokens: int) -> None:
        self._first = n_tokens // 2

    def rope(self, x: Tensor, positions: tuple[int, ...], rope: RopeSpec, context_tokens: int = 0) -> Tensor:
        moved = tuple(position + (position >= self._first) for position in positions)
        return super().rope(x, moved, rope, context_tokens)


def error(found: Tensor, expected: Tensor) -> float:
    """Normalised squared."""
    return float((found - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_logits_are_those_of_transformers_at_every_depth(model: tuple[Any, Path], n_tokens: int) -> None:
    spec = read_spec(model[1])
    weights, token_ids = load_dense(Checkpoint(model[1], spec)), text(n_tokens)
    expected = their_logits(model[0], token_ids)
    for ops, fits in ((BatchedTorchOps(), True), (OffByOne(n_tokens), False)):
        found = our_logits(ReferenceExecutor(spec, weights, n_tokens, ops), token_ids)
        assert ((found - expected).abs().max() <= TOLERANCE * expected.abs().max()) == fits


@pytest.mark.parametrize("n_tokens", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(1)
def test_the_cpus_logits_are_the_references_at_every_depth(
    model: tuple[Any, Path], n_tokens: int, kind: str, kernels: Path
) -> None:
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    spec = read_spec(model[1])
    weights, token_ids = tiled(spec, Checkpoint(model[1], spec), "codebook", "int8"), text(n_tokens)

    def cache() -> CpuKvCache:
        return CpuKvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, n_tokens, kind=kind)

    expected = our_logits(ReferenceExecutor(spec, weights, n_tokens, BatchedTorchOps(), cache=cache()), token_ids)
    executor = CpuExecutor(spec, weights, n_tokens, 1, cache=cache())
    found = our_logits(executor, token_ids)
    for early_or_late in zip(found.tensor_split(2), expected.tensor_split(2), strict=True):
        assert error(*early_or_late) <= CPU_ERROR[kind]
    assert torch.equal(our_logits(executor, token_ids, CHUNK_TOKENS + 77), found)


@pytest.mark.parametrize("asked", ["by number", "by limits"])
def test_a_context_beyond_the_original_one_is_told_and_stretched(asked: str, demo: Path, tmp_path: Path) -> None:
    made = random_model("phi3-longrope", vocab_size=read_spec(demo).vocab_size)
    folder = save_checkpoint(made, tmp_path / "longrope", tokenizer_from=demo)
    prompt, told = text(170), list[str]()
    size: dict[str, Any] = {"context_tokens": 400, "profile": "off"}
    if asked == "by limits":
        size = {
            "limits": Limits(context_tokens=400),
            "profile": reference_profile("rtx-4060-laptop-8gb"),
            "emulate": True,
        }
    options = {"quantizer": "none", "threads": 1, "progress": lambda stage, n_done, n_all: told.append(stage)} | size
    with Engine.from_pretrained(folder, **options) as engine:
        found = engine.generate(prompt, max_new_tokens=8, temperature=0, ignore_eos=True)
        assert engine.context_tokens == 400
    assert list(found.token_ids) == reference_greedy(made, prompt, 8)[0]
    assert [each for each in told if "original 160, so its rotary positions are stretched (longrope)" in each]


def test_without_a_listener_a_stretched_context_is_a_warning_of_python(demo: Path, tmp_path: Path) -> None:
    made = random_model("phi3-longrope", vocab_size=read_spec(demo).vocab_size)
    folder = save_checkpoint(made, tmp_path / "longrope", tokenizer_from=demo)
    options: dict[str, Any] = {"quantizer": "none", "threads": 1, "profile": "off", "progress": False}
    with pytest.warns(UserWarning, match="original 160, so its rotary positions are stretched"):
        Engine.from_pretrained(folder, context_tokens=400, **options).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine.from_pretrained(folder, context_tokens=160, **options).close()
