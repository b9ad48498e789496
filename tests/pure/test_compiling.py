"""Processes that fill an empty kernel cache while a model is read: when they start, and that they always end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hetero_ee.models.known_shapes import known_spec
from hetero_ee.runtime.compiling import Compilation
from hetero_ee.runtime.kernel_cache import KernelCache
from hetero_ee.weights.model_weights import ModelWeights

SPEC = known_spec("llama-2-7b")
EMPTY = ModelWeights({}, {}, "none")
# Starts the processes in a daemon thread, as a program with a window does.
LOADING = """
import sys, threading, time
from pathlib import Path
from hetero_ee.runtime.compiling import Compilation
from hetero_ee.runtime.kernel_cache import KernelCache
def load():
    with Compilation(KernelCache(Path(sys.argv[1])), 2):
        print("started", flush=True)
        time.sleep(60)
threading.Thread(target=load, daemon=True).start()
time.sleep(60)
"""
Started = list[tuple[list[str], "subprocess.Popen[bytes]"]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Collects the processes, which wait for the end of standard input instead of compiling."""
    found: Started = []

    def start(folder: Path, group: list[str]) -> "subprocess.Popen[bytes]":
        found.append((group, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)))
        return found[-1][1]

    monkeypatch.setattr("hetero_ee.runtime.compiling._started", start)
    yield found
    for _, process in found:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.parametrize(("n_threads", "n_processes"), [(1, 0), (2, 2), (16, 3)])
def test_as_many_processes_as_threads_and_groups(
    tmp_path: Path, started: Started, n_threads: int, n_processes: int
) -> None:
    with Compilation(KernelCache(tmp_path), n_threads):
        assert len(started) == n_processes
        names = [name for group, _ in started for name in group]
        assert names == (["attention", "products", "others"] if n_processes else [])
    assert all(process.poll() is not None for _, process in started)


def test_no_process_for_a_filled_cache_or_one_that_keeps_nothing(tmp_path: Path, started: Started) -> None:
    KernelCache(tmp_path).set_filled()
    for kernels in (KernelCache(tmp_path), KernelCache(tmp_path / "other", is_writable=False)):
        with Compilation(kernels, 2) as compilation:
            compilation.finish(SPEC, EMPTY, None)
    assert not started


def test_the_end_waits_for_all_and_reports_progress(tmp_path: Path, started: Started) -> None:
    said: list[tuple[str, int, int]] = []

    def progress(stage: str, n_done: int, n_all: int) -> None:
        said.append((stage, n_done, n_all))
        waiting = [process for _, process in started if process.poll() is None]
        if waiting:
            waiting[0].communicate(b"\n", timeout=10)

    with Compilation(KernelCache(tmp_path), 2) as compilation:
        compilation.finish(SPEC, EMPTY, progress)
        assert [process.returncode for _, process in started] == [0, 0]
    assert said[0] == ("Compiling the CPU kernels", 0, 3) and said[-1] == ("Compiling the CPU kernels", 3, 3)


def test_an_interrupt_ends_the_processes(tmp_path: Path, started: Started) -> None:
    with pytest.raises(KeyboardInterrupt), Compilation(KernelCache(tmp_path), 2):
        raise KeyboardInterrupt
    assert len(started) == 2 and all(process.returncode for _, process in started)


@pytest.mark.sample(0)
@pytest.mark.parametrize("end", ["kill", "interrupt of a program whose load runs in a thread"])
def test_no_process_outlives_the_program(tmp_path: Path, end: str) -> None:
    program = subprocess.Popen([sys.executable, "-c", LOADING, tmp_path], stdout=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline() == b"started\n"
    compilers = psutil.Process(program.pid).children()
    program.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
    program.communicate(timeout=10)
    _, running = psutil.wait_procs(compilers, timeout=10)
    for each in running:
        each.kill()
    assert len(compilers) == 2 and not running


def test_a_process_that_cannot_start_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, group: list[str]) -> "subprocess.Popen[bytes]":
        raise OSError("no more processes")

    monkeypatch.setattr("hetero_ee.runtime.compiling._started", refuse)
    with Compilation(KernelCache(tmp_path), 2) as compilation:
        compilation.finish(SPEC, EMPTY, lambda *_: pytest.fail("there is nothing to wait for"))


@pytest.mark.parametrize(("n_kv_heads", "compiled"), [(32, []), (16, [(2, 1), (2, 4)]), (4, [(8, 1)])])
def test_other_attention_of_a_measurement_is_compiled_last(
    tmp_path: Path,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    n_kv_heads: int,
    compiled: list[tuple[int, int]],
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("hetero_ee_cpu_ops.ahead.attention", lambda *call: calls.append(call))
    with Compilation(KernelCache(tmp_path), 2) as compilation:
        for _, process in started:
            process.communicate(b"\n", timeout=60)
        compilation.finish(replace(SPEC, n_kv_heads=n_kv_heads), EMPTY, None)
    assert calls == compiled


def test_compiling_starts_before_torch_is_imported(tmp_path: Path) -> None:
    program = """
import sys
from hetero_ee.runtime.compiling import Compilation
with Compilation.started(2, None) as compilation:
    assert len(compilation._processes) == 2 and "torch" not in sys.modules
compilation.__exit__()
"""
    environment = os.environ | {"HETERO_EE_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)
