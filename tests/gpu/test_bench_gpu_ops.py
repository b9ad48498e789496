"""The benchmark of the GPU's operations where there is no GPU: it says so, and compares results when asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_support import IS_INTERPRETED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "bench" / "bench_gpu_ops.py"

pytest.importorskip("triton")


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *flags], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.sample(0)
@pytest.mark.few(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("flags", [(), ("--json",), ("--json", "--quick")])
def test_without_a_gpu_it_says_so(flags: tuple[str, ...]) -> None:
    done = run(*flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "There is no GPU that torch can use: nothing was measured.\n"


@pytest.mark.sample(0)
@pytest.mark.skipif(IS_INTERPRETED, reason="runs a process of its own")
def test_it_compares_small_products() -> None:
    done = run("--small")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12


def test_goals_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of the report, on made-up times."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import bench_gpu_ops as bench

    rows = [
        bench.Row("matmul", "linear", 4096, 4096, m, us, 9437184 / us / 1e3, 9437184 / us / 1e3 / 1000, 0.0)
        for m, us in {1: 10.0, 8: 16.5}.items()
    ]
    goals = list(bench.goals(rows))
    assert [goal["met"] for goal in goals] == [True, False]
    report = bench.Report({"card": "made up"}, 1000.0, rows, [bench.peer("torch fp16", (4096, 4096), 1, 40.0)], goals)
    assert "| matmul | linear | 4096 x 4096 | 1 | 10.0 | 944 | 94% | 0e+00 |" in bench.table(report)
    assert json.loads(json.dumps(bench.asdict(report)))["goals"][1]["value"] == 1.65
