"""The benchmark for the day a GPU is there: without one it says so, and a dry run goes through every line of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu_support import IS_INTERPRETED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "bench" / "bench_gpu.py"

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="runs a process of its own")


def run(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("There is no GPU that torch can use")


def test_a_dry_run_measures_every_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run("--dry-run", "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "no figure here means anything" in done.stdout and "failed" not in done.stdout
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["is_dry_run"] and found["kernels"]["passed"]
    assert {(row["m"], row["layout"]) for row in found["machine"]["products"]} >= {(1, "int4"), (8, "int8")}
    assert [row["gpu_layers"] for row in found["plans"]] == [1, 2, 3, 4]
    assert all(row["same_text"] and row["tokens_per_pass"] > 1 for row in found["plans"])
    assert len(found["goals"]) == 2 * 5 + 3 * 4


def test_a_part_without_time_left_is_left_out(tmp_path: Path) -> None:
    done = run("--dry-run", "--minutes", "0", "--json", tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert done.returncode == 1 and all("left out" in found[part]["failed"] for part in ("kernels", "machine", "plans"))
