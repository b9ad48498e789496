"""Runs the tests below interpreted/ in Triton's interpreter, in a process of their own. With a GPU, they run on that.

One of them by hand: TRITON_INTERPRET=1 pytest tests/gpu/interpreted/test_norm.py
The same as PTX compiled for a class of cards: PTX_ARCHITECTURE=86 pytest -n 0 tests/gpu/interpreted/test_norm.py
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
PTX_TIMEOUT_S = 4 * 3600
INTERPRETER = {"TRITON_INTERPRET": "1"}

pytestmark = pytest.mark.skipif(can_run_kernels(), reason="the tests below interpreted/ run in this very process")


def run(
    report: Path, *options: str, switch: dict[str, str] = INTERPRETER, timeout_s: int = TIMEOUT_S
) -> dict[str, list[str]]:
    """Of each file that has any: a line for each of its tests, beginning with what became of it."""
    command = [sys.executable, "-m", "pytest", "-n", "0", *map(str, FILES), *options]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
    environment = os.environ | switch
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
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


@pytest.mark.slow
@pytest.mark.parametrize("has_jitter", ["0", "1"])
@pytest.mark.parametrize("architecture", ["75", "80", "86", "89", "90", "120"])
def test_as_compiled_ptx(architecture: str, has_jitter: str, tmp_path: Path) -> None:
    """For each class of cards, also with approximate instructions that are less exact than the CPU's."""
    if has_jitter == "1" and architecture != "86":
        pytest.skip("once is enough: the classes have the same approximate instructions")
    switch = {"PTX_ARCHITECTURE": architecture, "PTX_JITTER": has_jitter}
    assert run(tmp_path / "report.xml", "-m", "not slow", switch=switch, timeout_s=PTX_TIMEOUT_S)
