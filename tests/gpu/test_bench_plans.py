"""The benchmark of plans where there is no GPU: it says so; its table on made-up figures."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "bench" / "bench_plans.py"


@pytest.mark.sample(0)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "There is no GPU that torch can use: nothing was measured.\n"


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import bench_plans as bench

    rows = [bench.Row("hetero-ee", 4.0, 12, 210.0, 199.96, 11.0, 10.5), bench.Row("llama.cpp", 0.0, note="ImportError")]
    assert bench.table(rows).splitlines()[2:] == [
        "| hetero-ee | 4.0 | 12 | 210.0 | 200.0 | 11.0 | 10.5 |  |",
        "| llama.cpp | all |  |  |  |  |  | ImportError |",
    ]


def test_the_prompts_time_is_not_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import bench_plans as bench

    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def run(n: int) -> None:
        now[0] += 5.0 + 0.25 * n

    assert bench.generation_rate(run, 64) == pytest.approx(4.0)
