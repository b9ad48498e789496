"""The demo model's twin with ReLU: small enough to ship, and as sparse as its page says."""

from pathlib import Path

import pytest

from hetero_ee import Engine

TWIN = Path(__file__).parents[1] / "assets" / "relu_twin"
MOST_BYTES = 8_000_000
SHARE_USED = 1 - 0.937  # of neurons; README.md beside it


def test_it_is_small_and_as_sparse_as_its_page_says(cache: Path) -> None:
    assert sum(file.stat().st_size for file in TWIN.iterdir()) < MOST_BYTES
    with Engine.from_pretrained(TWIN, sparsity="exact", threads=1, profile="off") as engine:
        found = engine.generate("Once upon a time, there was a little", max_new_tokens=64, ignore_eos=True)
        assert found.n_generated_tokens == 64
        assert engine.neuron_share == pytest.approx(SHARE_USED, abs=0.02)
