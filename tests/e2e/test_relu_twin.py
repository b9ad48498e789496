"""The demo model's twin with ReLU: small enough to ship, as sparse as its page says, and exact where it skips."""

from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_ee import Engine, SamplingParams
from hetero_ee.decoding.requests import Ending
from hetero_ee.runtime.drafted import DraftEnd
from hetero_ee.speculation.drafting import Drafting
from hetero_ee.speculation.statistics import DraftCounts
from hetero_ee.speculation.stop_rule import FixedThreshold
from tests.exact_cases import Run

TWIN = Path(__file__).parents[1] / "assets" / "relu_twin"
MOST_BYTES = 8_000_000
SHARE_USED = 1 - 0.937  # of neurons; README.md beside it
EXIT_LAYER = 4  # whose likeliest token is the model's 0.78 of the time; ditto
N_TOKENS = 64

MOODS = ("little", "happy", "sad", "big", "brave", "shy", "old", "funny", "kind", "hungry")
HEROES = ("girl", "boy", "dog", "cat", "bird", "bear", "rabbit", "car", "tree", "frog")
SCENES = ("One day, a", "Once there was a")


@pytest.fixture
def twin(kernels: Path) -> Iterator[Engine]:
    """Converted into the run's own cache: once for all tests."""
    with Engine.from_pretrained(TWIN, sparsity="exact", threads=1, profile="off") as engine:
        yield engine


def openings(n_prompts: int) -> list[str]:
    """Up to 200 different ones."""
    return [f"{scene} {mood} {hero}" for mood, hero, scene in islice(product(MOODS, HEROES, SCENES), n_prompts)]


def run_of(engine: Engine, n_prompts: int) -> Run:
    prompts = [engine._tokenizer.encode(text) for text in openings(n_prompts)]
    params = SamplingParams(N_TOKENS, ignore_eos=True)
    return Run(engine, prompts, params, Ending(frozenset(), engine.context_tokens))


class EveryNeuron:
    """A sparse FFN's kernel that leaves none out: a token beside the others needs them all."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, x: Any, active: Any, up: Any, down: Any) -> Any:
        every = np.ones_like(active[:1])
        return self._kernel(np.concatenate([x, x[:1]]), np.concatenate([active, every]), up, down)[:-1]


@pytest.mark.sample(0)
def test_it_is_small_and_as_sparse_as_its_page_says(twin: Engine) -> None:
    assert sum(file.stat().st_size for file in TWIN.iterdir()) < MOST_BYTES
    found = twin.generate("Once upon a time, there was a little", max_new_tokens=N_TOKENS, ignore_eos=True)
    assert found.n_generated_tokens == N_TOKENS
    assert twin.neuron_share == pytest.approx(SHARE_USED, abs=0.02)


@pytest.mark.parametrize("n_prompts", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_skipping_neurons_changes_no_bit(twin: Engine, n_prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(twin, n_prompts)
    run.params = run.params.changed(logprobs=1)
    sparse = run.full()
    monkeypatch.setattr(twin.executor._ops, "_sparse_ffn", EveryNeuron(twin.executor._ops._sparse_ffn))  # type: ignore[attr-defined]
    assert run.full() == sparse
    assert len(sparse) == n_prompts and all(len(tokens) == N_TOKENS for tokens in sparse)


@pytest.mark.parametrize("n_prompts", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_exact_early_exit_on_top_changes_no_token(twin: Engine, n_prompts: int) -> None:
    run, counts = run_of(twin, n_prompts), DraftCounts()
    exact = run.exact(Drafting(EXIT_LAYER, 4, FixedThreshold(0.4), DraftEnd()), counts=counts)
    assert exact == run.full()
    drafts = counts.statistics(twin.spec.n_layers, EXIT_LAYER)
    assert drafts.n_verified < drafts.n_tokens + n_prompts * N_TOKENS // 10  # few drafts are wrong,
    assert drafts.n_steps < 0.7 * drafts.n_tokens  # and they save every third step
