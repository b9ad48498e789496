"""The benchmark of long prompts on short ones: every row is there, texts are full mode's; no time is judged."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from hetero_ee_profiles.reference import reference_profile

FOLDER = Path(__file__).parents[1] / "bench"
N_PROMPT = 600  # two chunks


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, kernels: Path) -> Any:
    """Its modules import each other as a script's do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bench_long_prompt")


@pytest.mark.sample(0)
def test_rows_of_both_modes(bench: Any, demo: Path) -> None:
    stories = bench.Stories.opened(1, 8)
    full, exact = bench.LongPrompts(stories, reference_profile("rtx-4060-laptop-8gb"), 1).rows(N_PROMPT)
    stories.engine.close()
    assert (full.mode, exact.mode, full.head_share) == ("full", "exact", 0.0) and 0 < exact.head_share < 1
    for row in (full, exact):
        assert min(row.prompt_rate, row.rate, row.short_rate, row.ratio, row.first_chunk_s, row.last_chunk_s) > 0
        assert str(row).count("|") == bench.HEADING.splitlines()[0].count("|")
