"""Runs the tests below interpreted/ in Triton's interpreter, in processes of their own. With a GPU, they run on that.

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
MAX_PROCESSES = 4
TIMEOUT_S = 1800

pytestmark = pytest.mark.skipif(can_run_kernels(), reason="the tests below interpreted/ run in this very process")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of each file that was asked for: a line for each of its tests, beginning with what became of it."""
    folder = tmp_path_factory.mktemp("interpreted")
    mine = [item for item in request.session.items if item.path == Path(__file__)]
    asked = sorted({item.callspec.params["file"] for item in mine if isinstance(item, pytest.Function)})
    n_processes = min(len(asked), os.cpu_count() or 1, MAX_PROCESSES)
    reports = [folder / f"{number}.xml" for number in range(n_processes)]
    started = [start(asked[number::n_processes], report) for number, report in enumerate(reports)]
    lines: dict[str, list[str]] = {}
    for process, report in zip(started, reports, strict=True):
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert report.exists(), output
        for case in ElementTree.parse(report).iter("testcase"):
            lines.setdefault(Path(case.get("file", "")).name, []).append(outcome(case))
    return lines


def start(files: list[Path], report: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", *map(str, files), f"--junitxml={report}", "-o", "junit_family=xunit1"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def outcome(case: ElementTree.Element) -> str:
    problems = [part.text or "" for part in case if part.tag in ("failure", "error")]
    return "\n".join([f"FAILED {case.get('name')}", *problems]) if problems else f"passed {case.get('name')}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path, results: dict[str, list[str]]) -> None:
    lines = results.get(file.name, [])
    failures = [line for line in lines if line.startswith("FAILED")]
    assert lines and not failures, "\n\n".join(failures) or f"{file.name} ran no test"
