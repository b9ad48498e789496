"""The SpecEE benchmark's tables on the demo model, and the parts of it that can be checked without a model."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.planning.statistics import DepthStatistics

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tests" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, whose modules import each other as a script's do."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("bench_specee")


def test_questions_have_one_right_answer(bench: Any) -> None:
    texts = [" ".join(f"{text}-{word}" for word in range(60)) for text in range(6)]
    asked = bench.questions(texts, 40, has_arithmetic=True)
    assert asked == bench.questions(texts, 40, has_arithmetic=True) and len(asked) == 40
    assert {each.right for each in asked} == {0, 1, 2, 3}
    for number, each in enumerate(asked):
        assert len(set(each.choices)) == 4
        if number % 2:
            a, b = each.context.removeprefix("Question: What is ").removesuffix("?\nAnswer:").split(" + ")
            assert [int(choice) == int(a) + int(b) for choice in each.choices].index(True) == each.right
        else:
            text, word = each.context.split()[-1].split("-")
            assert each.choices[each.right].startswith(f" {text}-{int(word) + 1} ")


def test_exits_keep_their_relative_depth_in_a_deeper_model(bench: Any) -> None:
    known = DepthStatistics("specee", "a test", (3, 6, 9), (0.1, 0.2, 0.3), True, False, (1.0, 0.5, 1.0), (3, 9))
    found = bench.scaled(known, 12, 32)
    assert found.exit_layers == (8, 16, 24) and found.shares == known.shares and found.judged == known.judged
    joined = bench.scaled(known, 12, 4)
    assert joined.exit_layers == (1, 2, 3) and joined.planned == (1, 2, 3)


def test_answers_are_compared_by_question(bench: Any) -> None:
    specee_quality, subjects = (importlib.import_module(name) for name in ("specee_quality", "specee_subjects"))
    answers = specee_quality.Answers((0, 1, 2, 2), 12.0)
    asked = [subjects.Question("", ("a", "b", "c", "d"), right) for right in (0, 1, 3, 2)]
    assert answers.accuracy(asked) == 0.75 and answers.agreement(specee_quality.Answers((0, 0, 2, 2), 12.0)) == 0.75


@pytest.mark.full
def test_all_tables_of_the_demo_model(demo: Path, kernels: Path) -> None:
    command = [sys.executable, BENCH / "bench_specee.py", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (document,) = json.loads(done.stdout)
    assert {each["schedule"] for each in document["depths"]} == {"none", "offline", "online", "both"}
    assert {each["label"] for each in document["speed"]} == {"measured", "emulated"}
    speeds = [each for each in document["speed"] if not each["reason"]]
    assert {"full", "exact", "specee"} <= {each["way"] for each in speeds}
    assert all(each["same"] == 1 for each in speeds if each["way"].startswith(("full", "exact")))
    assert {each["label"] for each in document["replay"]} == {"replayed", "predicted"}
    assert document["quality"][0]["agreement"] == 1
