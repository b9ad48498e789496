"""The benchmark of a new model's first minute: what a conversion took is read from its process. No time is judged."""

from pathlib import Path

import pytest

from tests.bench.bench_first_minute import leave_page_cache, opening
from tests.store_support import one_layer_model


@pytest.mark.sample(0)  # two processes that import torch
def test_a_conversion_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ".", prepend=":")
    folder = one_layer_model(tmp_path / "tiny")
    leave_page_cache(folder)
    measured = opening(folder, Path(__file__).parents[2], n_runs=1, threads=1)
    assert measured["cold s"] > 0 and measured["warm s"] > 0 and measured["peak GB"] > 0
    assert not (tmp_path / "store").exists()
