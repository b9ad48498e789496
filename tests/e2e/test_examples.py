"""What examples/ and README's Python show runs, against the demo model, as it stands there."""

import ast
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STORY = ", there was a little girl named Lily."

pytestmark = pytest.mark.usefixtures("converted_demo")


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("generate.py", monkeypatch)
    out, err = capsys.readouterr()
    assert out.startswith(STORY) and "\nTom had a dog." in out
    assert re.search(r"^\[60 tokens, \d+ a second\]$", err, re.M)


def test_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tom had a dog.\nThe dog ran away.\n\nnot read\n"))
    run("chat.py", monkeypatch)
    replies = capsys.readouterr().out.splitlines()
    assert len([reply for reply in replies if reply.strip()]) >= 2


def test_asyncio(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("asyncio_stream.py", monkeypatch)
    texts = capsys.readouterr().out
    assert texts.startswith("Once upon a time" + STORY) and "\nTom had a dog." in texts


def test_every_cell_of_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """In order, as a kernel runs them; the last expression of a cell is what it shows."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    names: dict[str, Any] = {}
    shown: list[object] = []
    for code in codes:
        if code.startswith("!"):  # a command for the shell, which the tests of pages check
            continue
        *statements, last = ast.parse(code).body
        exec(compile(ast.Module(statements, []), "notebook", "exec"), names)  # noqa: S102 - our own file
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "notebook", "eval"), names))  # noqa: S307
        else:
            exec(compile(ast.Module([last], []), "notebook", "exec"), names)  # noqa: S102
    out = capsys.readouterr().out
    assert len(codes) > 4 and out.startswith(STORY)
    assert re.search(r"[1-9]\d* tokens/s after 0\.\d+ s", "\n".join(map(str, shown)))


def test_python_of_the_readme(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "my-llama").symlink_to(demo)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own file
    assert capsys.readouterr().out.startswith(STORY)
