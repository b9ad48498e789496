"""The draft head's training script: a few steps on a tiny text give a head that drafts for its model."""

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hetero_ee import Engine
from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from hetero_ee.speculation.sources.draft_head_opening import open_draft_head
from hetero_ee.speculation.sources.eagle3 import default_layers
from tests.draft_sources import taken

SCRIPTS = Path(__file__).parents[2] / "scripts"
STORY = "Once upon a time there was a {0}. The {0} saw a dog. They had a lot of fun.\n<|endoftext|>\n"


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a script in this process; what it prints."""

    def run_script(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        capsys.readouterr()
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.syspath_prepend(SCRIPTS)
    n_threads = torch.get_num_threads()
    yield run_script
    torch.set_num_threads(n_threads)


def test_a_short_training_makes_a_head_that_drafts(run: Run, tiny: Path, tmp_path: Path, cache: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("".join(STORY.format(animal) for animal in ("cat", "hen", "cow", "fox", "mouse") * 4))
    arguments = ["--model", str(tiny), "--texts", str(text), "--output", str(output)]
    run("train_draft_head.py", *arguments, "--smoke")
    first = json.loads((output / "config.json").read_text())
    assert 0 < len(first["draft_token_ids"]) < first["vocab_size"]
    metrics = json.loads(
        run("train_draft_head.py", *arguments, "--start", str(output), "--evaluate", str(text), "--smoke")
    )
    assert metrics["training"]["steps"] > 1 and metrics["training"]["texts"] == ["text.txt"]
    greedy = metrics["acceptance"]["temperature 0"]
    assert greedy["chains"] > 10 and len(greedy["acceptance_by_position"]) == 4 and greedy["tokens_a_pass"] >= 1
    assert json.loads((output / "config.json").read_text())["training"] == metrics["training"]
    trimming = ["--model", str(tiny), "--head", str(output), "--texts", str(text)]
    for coverage, n_tokens in (("0.3", 16), ("1.1", first["vocab_size"])):
        assert f"drafts {n_tokens} tokens" in run("draft_vocabulary.py", *trimming, "--coverage", coverage)
    with Engine.from_pretrained(tiny, quantizer="none") as engine:
        assert read_draft_head(output, engine.spec).weights.matrices["fc"].dequantize().dtype == torch.float32
        source = open_draft_head(output, engine.executor)
        source.observe(0, 0, [5, 6], torch.randn(2, engine.spec.hidden_size))
        assert len(taken(source, [5, 6, 7], 4)) == 4


@pytest.mark.sample(0)
def test_a_short_training_makes_a_head_of_three_layers(run: Run, tiny: Path, tmp_path: Path, cache: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "head"
    text.write_text("".join(STORY.format(animal) for animal in ("cat", "hen", "cow", "fox", "mouse") * 4))
    arguments = ["--model", str(tiny), "--texts", str(text), "--output", str(output), "--eagle", "3", "--smoke"]
    arguments += ["--replies", "60", "--reply", "8", "--traces", str(tmp_path / "traces.pt")]
    metrics = json.loads(run("train_draft_head.py", *arguments, "--evaluate", str(text)))
    assert len(metrics["acceptance"]) == 10, "five kinds, greedy and sampled"
    for found in metrics["acceptance"].values():
        assert found["chains"] > 10 and found["tokens_a_pass"] >= 1
    with Engine.from_pretrained(tiny, quantizer="none") as engine:
        head = read_draft_head(output, engine.spec)
        assert head.dialect.captured == default_layers(engine.spec.n_layers)
        assert head.draft_token_ids is not None and len(head.draft_token_ids) < engine.spec.vocab_size
    run("train_draft_head.py", *arguments, "--start", str(output))
