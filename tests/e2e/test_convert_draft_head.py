"""The script that turns a pickled draft head into safetensors: the head it makes, and what it refuses."""

import json
import subprocess
import sys
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


def converted(published: Path) -> subprocess.CompletedProcess[str]:
    folder = published.parent
    command = [sys.executable, str(SCRIPT), "--head", str(published), "--model", str(folder / "model")]
    return subprocess.run([*command, "--output", str(folder / "out")], capture_output=True, text=True, timeout=120)


def test_the_result_is_the_head(published: Path) -> None:
    assert converted(published).returncode == 0
    head, expected = read_draft_head(published.parent / "out", MODEL), head_weights()
    for short in ("fc", "qkv"):
        found, true = part_of(head, short), part_of(expected, short)
        assert found is not None and true is not None and torch.equal(found, true)
    again = converted(published)
    assert again.returncode == 1 and "is there already" in again.stderr


def test_a_head_of_eagle_3(published: Path) -> None:
    dialect = DIALECTS["SafeAILab"]
    tensors = {name.replace("layers.0.", dialect.layer): values for name, values in eagle3_tensors(dialect).items()}
    torch.save(tensors, published / "pytorch_model.bin")
    (published / "config.json").write_text(json.dumps(eagle3_config(dialect)))
    assert converted(published).returncode == 0
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
def test_what_is_no_head_leaves_nothing_behind(published: Path, content: Any, words: str) -> None:
    mark = published.parent / "gone off"
    torch.save({"a": Bomb(mark)} if content == "bomb" else content, published / "pytorch_model.bin")
    result = converted(published)
    assert result.returncode == 1 and words in result.stderr and "Traceback" not in result.stderr
    assert not mark.exists() and not list(published.parent.glob("out/*"))
