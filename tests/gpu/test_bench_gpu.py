"""The benchmark for the day a GPU is there: without one it says so, and a dry run goes through every line of it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device_support import round_profile
from tests.gpu_support import IS_INTERPRETED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "bench" / "bench_gpu.py"

pytestmark = [pytest.mark.sample(0), pytest.mark.skipif(IS_INTERPRETED, reason="runs a process of its own")]


def run(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("There is no GPU that torch can use")


@pytest.mark.long
def test_a_dry_run_measures_every_part(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run("--dry-run", "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "no figure here means anything" in done.stdout and "failed" not in done.stdout
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["is_dry_run"] and found["kernels"]["passed"] and not found["failures"]
    assert {(row["m"], row["layout"]) for row in found["machine"]["products"]} >= {(1, "int4"), (8, "int8")}
    assert [row["gpu_layers"] for row in found["plans"]] == [4, 3, 2, 1]
    assert all(row["same_text"] and row["tokens_per_pass"] > 1 for row in found["plans"])
    assert all(0 < row["as_first_row"] <= len(row["text"]) and not row["replanned"] for row in found["plans"])
    assert len(found["goals"]) == 2 * 5 + 3 * 4


def test_a_part_without_time_left_is_left_out(tmp_path: Path) -> None:
    done = run("--dry-run", "--minutes", "0", "--json", tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert done.returncode == 1 and all("left out" in found[part]["failed"] for part in ("kernels", "machine", "plans"))


@pytest.fixture
def bench_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import bench_gpu

    return bench_gpu


@pytest.fixture
def bench(bench_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A dry run that has plenty of time, on the machine of round numbers."""
    found = bench_gpu.dry_bench(time.perf_counter() + 1000)
    found.file, profile = tmp_path / "figures.json", round_profile()
    assert profile.gpu is not None
    cpu = tuple(replace(times, free_bytes=2**33) for times in profile.cpu)
    machine = replace(profile.machine, ram_bytes=2**33, vram_bytes=2**33)
    profile = replace(profile, cpu=cpu, gpu=replace(profile.gpu, free_bytes=2**33), machine=machine)
    monkeypatch.setattr(bench_gpu, "measure_profile", lambda *_, **__: profile)
    return found


def kept(bench: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench.file.read_text())
    return found


def test_minutes_that_end_after_a_part_leave_its_figures(bench_gpu: Any, bench: Any) -> None:
    bench.part("machine", bench_gpu.machine)
    assert kept(bench)["machine"]["products"], "a run that is killed here leaves them"
    bench.end_s = 0.0
    bench.part("plans", bench_gpu.plans)
    found = kept(bench)
    assert found["machine"]["products"] and "left out" in found["plans"]["failed"]
    assert found["failures"] == ["plans: TimeoutError: left out: the minutes are over"]


def test_a_gpu_that_is_not_measured_leaves_the_cpus_figures(
    bench_gpu: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = replace(round_profile(), gpu=None, link=None, warnings=("The GPU fell off the bus.",))
    monkeypatch.setattr(bench_gpu, "measure_profile", lambda *_, **__: alone)
    for name in ("machine", "plans"):
        bench.part(name, bench_gpu.PARTS[name])
    table = "\n".join(bench_gpu.markdown(bench.document))
    assert "\nCPU, " in table and "The GPU fell off the bus." in table
    assert [failure.split(":")[0] for failure in kept(bench)["failures"]] == ["plans", "machine"]


def fails_once(measure: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """What fails the first time it is called."""
    calls: list[None] = []

    def measured(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("an illegal memory access")
        return measure(*arguments) | more

    return measured


def test_a_row_that_fails_or_is_wrong_leaves_the_others(
    bench_gpu: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "exact_figures", fails_once(bench_gpu.exact_figures, same_text=False))
    monkeypatch.setattr(bench_gpu, "LAYER_SHARES", (1.0, 0.5))
    for name in ("machine", "plans"):
        bench.part(name, bench_gpu.PARTS[name])
    found = kept(bench)
    first, second = found["plans"]
    assert first["full"]["achieved"] > 0 and first["failed"] == {"exact": "RuntimeError: an illegal memory access"}
    assert second["exact"]["achieved"] > 0 and second["as_first_row"] == len(second["text"]), "the first text there is"
    assert [failure.split(":")[0] for failure in found["failures"]] == ["4 layers, exact", "2 layers"]
    assert "another plan" not in "\n".join(bench_gpu.markdown(bench.document))


def test_time_is_looked_at_before_each_mode(bench_gpu: Any, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full = bench_gpu.full_figures

    def last_one(bench: Any, *rest: Any) -> Any:
        found = full(bench, *rest)
        bench.end_s = 0.0
        return found

    monkeypatch.setattr(bench_gpu, "full_figures", last_one)
    for name in ("machine", "plans"):
        bench.part(name, bench_gpu.PARTS[name])
    found = kept(bench)["plans"]
    assert "full" in found[0] and [list(row["failed"]) for row in found] == [["exact"], *[["full", "exact"]] * 3]


def test_a_plan_that_was_replaced_is_flagged_and_has_no_goal(bench_gpu: Any, bench: Any) -> None:
    opening = bench.opening

    def replaced(*arguments: Any) -> Any:
        opened = opening(*arguments)
        opened.executor.plan = replace(opened.executor.plan)
        return opened

    bench.opening = replaced
    for name in ("machine", "plans"):
        bench.part(name, bench_gpu.PARTS[name])
    found = kept(bench)
    assert all(row["replanned"] == ["full", "exact"] for row in found["plans"])
    assert not [goal for goal in found["goals"] if "of predicted" in goal["goal"]]
    assert "full: another plan ran, for want of memory" in "\n".join(bench_gpu.markdown(bench.document))


def test_the_head_is_quantized_once(bench_gpu: Any, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = bench_gpu.draft_head_opening, list[None]()
    quantize = module.head_weights
    monkeypatch.setattr(module, "head_weights", lambda *a, **b: (calls.append(None), quantize(*a, **b))[1])
    for name in ("machine", "plans"):
        bench.part(name, bench_gpu.PARTS[name])
    assert len(calls) == 1 and len(kept(bench)["plans"]) == 4 and not kept(bench)["failures"]


def test_kernel_tests_that_are_cut_off_leave_what_they_said(
    bench_gpu: Any, bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "test_quantize.py").write_text(
        "import time\ndef test_right(): pass\ndef test_wrong(): assert 0\ndef test_slow(): time.sleep(600)\n"
    )
    monkeypatch.setattr(bench_gpu, "KERNEL_TESTS", str(tmp_path))
    monkeypatch.setattr(bench_gpu, "ROOT", tmp_path)
    bench.end_s = time.perf_counter() + 4 * 10
    bench.part("kernels", bench_gpu.kernels)
    found = kept(bench)
    assert "1 passed and 1 failed by then" in found["kernels"]["said"][0]
    assert "test_wrong FAILED" in found["kernels"]["failures"][0] and len(found["failures"]) == 1


def test_texts_are_compared_up_to_their_first_difference(bench_gpu: Any) -> None:
    assert [bench_gpu.agreeing_tokens([1, 2, 3], other) for other in ([1, 2, 3], [1, 9, 3], [9], [1])] == [3, 1, 0, 1]
