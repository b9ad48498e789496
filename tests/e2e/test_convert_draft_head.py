"""The script that turns a pickled draft head into safetensors: the head it makes, and what it refuses."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_ee.speculation.sources.draft_head_file import read_draft_head
from tests.draft_heads import CONFIG, MODEL, head_tensors, head_weights, part_of
from tests.eagle3_heads import DIALECTS, draft_ids, eagle3_config, eagle3_tensors

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_draft_head.py"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder with a pickled head, its model beside it."""
    for name, n_layers in (("head", 1), ("model", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": n_layers}))
    torch.save(head_tensors(), tmp_path / "head" / "pytorch_model.bin")
    return tmp_path / "head"


@pytest.fixture
def converted(published: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Runs the script in this process; the sentence that it ends with, if it does."""

    def run() -> str:
        places = {"--head": published, "--model": published.parent / "model", "--output": published.parent / "out"}
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *(str(word) for pair in places.items() for word in pair)])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as ended:
            return str(ended.code)
        return ""

    return run


def test_the_result_is_the_head(published: Path, converted: Callable[[], str]) -> None:
    assert converted() == ""
    head, expected = read_draft_head(published.parent / "out", MODEL), head_weights()
    for short in ("fc", "qkv"):
        found, true = part_of(head, short), part_of(expected, short)
        assert found is not None and true is not None and torch.equal(found, true)
    assert "is there already" in converted()


def test_a_head_of_eagle_3(published: Path, converted: Callable[[], str]) -> None:
    dialect = DIALECTS["SafeAILab"]
    tensors = {name.replace("layers.0.", dialect.layer): values for name, values in eagle3_tensors(dialect).items()}
    torch.save(tensors, published / "pytorch_model.bin")
    (published / "config.json").write_text(json.dumps(eagle3_config(dialect)))
    assert converted() == ""
    head = read_draft_head(published.parent / "out", MODEL)
    assert (
        head.draft_token_ids is not None
        and head.draft_token_ids.tolist() == draft_ids(len(head.draft_token_ids)).tolist()
    )


class Bomb:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("bomb", "tensors alone"),
        ([torch.zeros(2)], "expected tensors by name"),
        ({"fc.weight": torch.zeros(2)}, "lacks tensor"),
    ],
)
def test_what_is_no_head_leaves_nothing_behind(
    published: Path, converted: Callable[[], str], content: Any, words: str
) -> None:
    mark = published.parent / "gone off"
    torch.save({"a": Bomb(mark)} if content == "bomb" else content, published / "pytorch_model.bin")
    assert words in converted()
    assert not mark.exists() and not list(published.parent.glob("out/*"))
