"""Runs the tests below interpreted/ in Triton's interpreter, in a process of their own. With a GPU, they run on that.

One of them by hand: TRITON_INTERPRET=1 pytest tests/gpu/interpreted/test_norm.py
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.gpu_support import can_run_kernels

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
TIMEOUT_S = 1800

pytestmark = pytest.mark.skipif(can_run_kernels(), reason="the tests below interpreted/ run in this very process")


def run(report: Path, *options: str) -> dict[str, list[str]]:
    """Of each file that has any: a line for each of its tests, beginning with what became of it."""
    command = [sys.executable, "-m", "pytest", "-n", "0", *map(str, FILES), *options]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert report.exists(), ended.stdout + ended.stderr
    lines: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        lines.setdefault(Path(case.get("file", "")).name, []).append(outcome(case))
    failures = [line for of_file in lines.values() for line in of_file if line.startswith("FAILED")]
    assert not failures, "\n\n".join(failures)
    return lines


def outcome(case: ElementTree.Element) -> str:
    problems = [part.text or "" for part in case if part.tag in ("failure", "error")]
    return "\n".join([f"FAILED {case.get('name')}", *problems]) if problems else f"passed {case.get('name')}"


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [
        "not slow and not full",
        pytest.param("full", marks=pytest.mark.full),
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
def test_in_the_interpreter(cases: str, tmp_path: Path) -> None:
    found = run(tmp_path / "report.xml", "-m", cases)
    assert set(found) == {file.name for file in FILES} or cases != "not slow and not full"
    assert found
