"""Every check of hetero-ee doctor: what makes it ok, warn or fail, and that none says who sits at the machine."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.config.settings import Settings, read_settings
from hetero_ee.errors import UsageError
from hetero_ee.runtime.kernel_cache import KernelCache, kernel_cache_folder
from hetero_ee.weights.store.names import MANIFEST_FILE
from hetero_ee_cli.checks import configuration, finding, machine, software, storage
from hetero_ee_cli.checks.finding import Finding, Row, Status, examine, ok, once, presentable
from hetero_ee_cli.checks.tested_versions import TESTED_VERSIONS
from hetero_ee_profiles.host.disk import DiskInfo
from hetero_ee_profiles.host.host import Answer, MemoryCounts, this_host
from hetero_ee_profiles.host.torch_build import TorchBuild, TorchGpu
from tests.pure.test_gpu_inventory import AMD_FILES, FULL, PCI_FILES
from tests.recorded_hosts import GIB, arm_board, in_cgroup_2, intel_hybrid, recorded, ryzen

CPU_TORCH = TorchBuild("2.13.0+cpu", None, None, (), "")
CUDA_TORCH = TorchBuild("2.13.0+cu130", "13.0", None, (), "The NVIDIA driver on your system is too old")
GPU_TORCH = dataclasses.replace(CUDA_TORCH, gpus=(TorchGpu("NVIDIA T4", 16 * GIB, 15 * GIB, "7.5"),), problem="")
SMI = {"nvidia-smi": Answer(FULL)}
NOT_ANSWERING = {"nvidia-smi": Answer("", "no answer within 2 s")}
Make = Callable[[], Finding]


def versions(**installed: str) -> Callable[[str], str | None]:
    return installed.get


def instructions(files: dict[str, str], compiled_for: str, **environment: str) -> Finding:
    return machine.instructions(recorded(files), environment, lambda: compiled_for)


def gpu_matmul(kind: str | None, **installed: str) -> Finding:
    return software.gpu_matmul(lambda: kind, versions(**installed), lambda name: name in installed)


def without_numba() -> str:
    raise ImportError("Numba needs NumPy 2.3 or less")


def gpu(files: dict[str, str], commands: dict[str, Answer], build: TorchBuild) -> Finding:
    return machine.gpu(recorded(files, commands), lambda: build)


def memory(available_bytes: int, **files: str) -> Finding:
    return machine.memory(recorded(files, memory=MemoryCounts(16 * GIB, available_bytes, GIB)))


CHECKS: dict[str, tuple[Make, str, str, str]] = {
    # name: check, status, what the finding says, what the advice says
    "Linux": (lambda: machine.operating_system(recorded(ryzen())), "ok", "Ubuntu 24.04.1 LTS, kernel 6.8", ""),
    "WSL": (lambda: machine.operating_system(recorded(release="5-microsoft-WSL2")), "ok", "glibc 2.39, WSL", ""),
    "macOS": (lambda: machine.operating_system(recorded(system="darwin")), "warn", "macOS", "Only Linux is tested"),
    "musl": (lambda: machine.operating_system(recorded(libc="")), "warn", "no glibc", "torch is built for glibc"),
    "CPU": (lambda: machine.processor(recorded(ryzen())), "ok", "8 cores with 16 hardware threads (x86_64), 8 us", ""),
    "hybrid": (lambda: machine.processor(recorded(intel_hybrid())), "ok", "2 performance and 4 efficiency cores", ""),
    "quota": (
        lambda: machine.processor(recorded(in_cgroup_2(ryzen(), "250000 100000", ""))),
        *("ok", "limit of 2.5 cores, 2 usable", ""),
    ),
    "best instructions": (lambda: instructions(ryzen(), "AVX-512 VNNI"), "ok", "use AVX-512 VNNI", ""),
    "more than the system says": (lambda: instructions({}, "AVX2"), "ok", "use AVX2", ""),
    "limited by a variable": (
        lambda: instructions(ryzen(), "AVX2", NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=""),
        *("warn", "use AVX2 code, but the processor has AVX-512 VNNI", "Unset NUMBA_CPU_NAME, NUMBA_CPU_FEATURES."),
    ),
    "limited by Numba": (lambda: instructions(arm_board(), "generic"), "warn", "has NEON dot", "Update numba"),
    "old processor": (lambda: instructions({}, "generic"), "warn", "generic code", "many times faster"),
    "broken Numba": (
        lambda: machine.instructions(recorded(ryzen()), {}, without_numba),
        *("fail", "Numba can't be used (ImportError: Numba needs NumPy", "Reinstall hetero-ee."),
    ),
    "memory": (lambda: memory(8 * GIB), "ok", "16.0 GiB, 8.0 GiB available, swap 1.0 GiB", ""),
    "little memory": (lambda: memory(GIB // 2), "warn", "0.5 GiB available", "Close other programs"),
    "small container": (
        lambda: memory(8 * GIB, **in_cgroup_2({}, "", str(GIB // 2))),
        *("warn", "container limit of 0.5 GiB", "Close other programs"),
    ),
    "huge pages": (lambda: machine.huge_pages(recorded(ryzen())), "ok", "madvise", ""),
    "no huge pages": (lambda: machine.huge_pages(recorded()), "ok", "no transparent huge pages", ""),
    "no GPU": (lambda: gpu({}, {}, CPU_TORCH), "ok", "none found; everything runs on the CPU", ""),
    "GPU": (
        lambda: gpu({}, SMI, GPU_TORCH),
        *("ok", "NVIDIA T4, 16.0 GiB (15.0 GiB free), compute capability 7.5, driver 560.35.03", ""),
    ),
    "GPU only torch sees": (lambda: gpu({}, {}, GPU_TORCH), "ok", "NVIDIA T4", ""),
    "torch without CUDA": (
        lambda: gpu({}, SMI, CPU_TORCH),
        *("warn", "6.0 GiB (5.8 GiB free), compute capability 8.6, driver 560.35.03; torch is built for CPU only"),
        "pytorch.org",
    ),
    "torch for another maker": (lambda: gpu(AMD_FILES, {}, CUDA_TORCH), "warn", "built for CUDA 13.0", "pytorch.org"),
    "driver too old": (
        lambda: gpu({}, SMI, CUDA_TORCH),
        "warn",
        "can't use it (The NVIDIA driver",
        "Update the driver",
    ),
    "no driver": (lambda: gpu(PCI_FILES, {}, CPU_TORCH), "warn", "GPU 0x2520, without a driver", "Install the GPU's"),
    "driver that hangs": (
        lambda: gpu({}, NOT_ANSWERING, CPU_TORCH),
        "warn",
        "nvidia-smi: no answer",
        "Check the GPU's",
    ),
    "torch": (lambda: software.torch(lambda: CPU_TORCH), "ok", "2.13.0+cpu, CPU only", ""),
    "broken torch": (
        lambda: software.torch(lambda: TorchBuild("", None, None, (), "exit code 1")),
        *("fail", "can't be imported (exit code 1)", "import torch"),
    ),
    "Python": (software.python, "ok", "3.", ""),
    "version": (software.hetero_ee_version, "ok", "0.", ""),
    "transformers": (lambda: software.needed("transformers", versions(transformers="5.0")), "ok", "5.0", ""),
    "no transformers": (
        lambda: software.needed("transformers", versions()),
        "fail",
        "not installed",
        "Reinstall hetero-ee",
    ),
    "tested versions": (lambda: software.untested_versions(TESTED_VERSIONS.get), "ok", "no dependency is newer", ""),
    "older versions": (
        lambda: software.untested_versions(versions(a="2.9", b="1.0+cpu"), {"a": "2.10.1", "b": "1.0", "absent": "1"}),
        *("ok", "no dependency is newer", ""),
    ),
    "newer versions": (
        lambda: software.untested_versions(
            versions(a="2.10.2.post1", b="1.0", c="2"), {"a": "2.10.1", "b": "1.0", "c": "1.9"}
        ),
        *("warn", "a 2.10.2.post1 (tested up to 2.10.1), c 2 (tested up to 1.9)", "with the tested versions"),
    ),
    "hub": (lambda: software.needed("huggingface_hub", versions(huggingface_hub="2.4.0")), "ok", "2.4.0", ""),
    "no hub": (lambda: software.needed("huggingface_hub", versions()), "fail", "not installed", "Reinstall hetero-ee"),
    "Numba": (lambda: software.numba(versions(numba="0.68", llvmlite="0.50")), "ok", "0.68, llvmlite 0.50", ""),
    "no Numba": (lambda: software.numba(versions(llvmlite="0.50")), "fail", "not installed", "Reinstall"),
    "no llvmlite": (lambda: software.numba(versions(numba="0.68")), "fail", "llvmlite is not installed", "Reinstall"),
    "Triton": (
        lambda: gpu_matmul("cuda", triton="3.7", bitsandbytes="0.50", torch="2.13"),
        *("ok", "triton 3.7, bitsandbytes 0.50; matmul_int4 on cuda is computed by triton, the fastest there is", ""),
    ),
    "Triton, no GPU": (
        lambda: gpu_matmul(None, triton="3.7", torch="2.13"),
        *("ok", "not used without a GPU: triton 3.7; matmul_int4 on cuda is computed by triton", ""),
    ),
    "no Triton, no GPU": (lambda: gpu_matmul(None, torch="2.13"), "ok", "not installed (GPU only)", ""),
    "no Triton": (
        lambda: gpu_matmul("cuda", bitsandbytes="0.50", torch="2.13"),
        *("warn", "computed by bitsandbytes, because triton can't be imported", "Install triton"),
    ),
    "no Triton for AMD": (
        lambda: gpu_matmul("rocm", bitsandbytes="0.50", torch="2.13"),
        *("warn", "matmul_int4 on rocm is computed by torch, because triton can't be imported", "Install triton"),
    ),
    "neither": (
        lambda: gpu_matmul("cuda", torch="2.13"),
        *("warn", "computed by torch, because triton and bitsandbytes can't be imported", "Install triton"),
    ),
    "not even torch": (lambda: gpu_matmul("cuda"), "fail", "nothing on this machine computes matmul_int4", "Reinstall"),
    "OpenMP": (
        lambda: software.openmp(recorded({}, {"/sbin/ldconfig": Answer("\tlibgomp.so.1 (libc6,x86-64) => /x\n")})),
        *("ok", "libgomp", ""),
    ),
    "no OpenMP": (lambda: software.openmp(recorded({}, {"/sbin/ldconfig": Answer("\tlibc")})), "ok", "none; only", ""),
    "no ldconfig": (lambda: software.openmp(recorded()), "ok", "unknown", ""),
    "OpenMP on Windows": (lambda: software.openmp(recorded(system="win32")), "ok", "not checked", ""),
    "clock": (lambda: machine.clock(4e9, Path(__file__)), "ok", "2096-10-02 07:06 UTC", ""),
    "clock behind": (
        lambda: machine.clock(0.0, Path(__file__)),
        "warn",
        "1970-01-01 00:00 UTC, before",
        "Set the clock",
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_findings(name: str) -> None:
    check, status, text, advice = CHECKS[name]
    found = check()
    assert (found.status.value, text in found.text, advice in found.advice) == (status, True, True), found
    assert bool(found.advice) == (status != "ok")


def test_an_installed_package_has_a_version_and_others_have_none() -> None:
    assert software.package_version("numba")
    assert software.package_version("no-such-package-anywhere") is None
    assert software.package_version("json") is None  # importable, but of no distribution


@pytest.mark.parametrize(
    ("disk", "status", "text"),
    [
        (DiskInfo(100 * GIB, 50 * GIB, "ext4"), "ok", "50.0 GiB of 100.0 GiB free, ext4; locks and mmap work"),
        (DiskInfo(100 * GIB, 50 * GIB, ""), "ok", "unknown file system"),
        (DiskInfo(100 * GIB, GIB, "ext4"), "warn", "1.0 GiB of 100.0 GiB free"),
        (DiskInfo(100 * GIB, 50 * GIB, "tmpfs"), "warn", "tmpfs, which is in RAM"),
        (DiskInfo(100 * GIB, 50 * GIB, "nfs4"), "warn", "nfs4, a network disk"),
    ],
)
def test_disks(disk: DiskInfo, status: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "disk_info", lambda host, folder: disk)
    found = storage.cache_disk(recorded(), tmp_path / "cache")
    assert found.status.value == status and text in found.text
    assert ("HETERO_EE_CACHE_DIR" in found.advice) == (status != "ok")
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = storage.cache_disk(this_host(), tmp_path / "file")
    assert found.status is Status.FAIL and "can't be used (Not a directory)" in found.text
    assert "HETERO_EE_CACHE_DIR" in found.advice


def test_what_the_cache_holds(tmp_path: Path) -> None:
    assert storage.stores(tmp_path) == ok("0 converted models, 0.0 GiB")
    assert storage.kernel_cache(tmp_path).text.startswith("not complete")
    (tmp_path / "stores" / "a").mkdir(parents=True)
    (tmp_path / "stores" / "stray").write_text("")
    with (tmp_path / "stores" / "a" / "weights.bin").open("wb") as weights:
        weights.truncate(GIB)
    assert storage.stores(tmp_path) == ok("0 converted models, 1 unfinished, 1.0 GiB")
    (tmp_path / "stores" / "a" / MANIFEST_FILE).write_text("")
    assert storage.stores(tmp_path) == ok("1 converted model, 1.0 GiB")
    for name in ("b.partial", "c.removed"):
        (tmp_path / "stores" / name).mkdir()
        (tmp_path / "stores" / name / MANIFEST_FILE).write_text("")
    assert storage.stores(tmp_path) == ok("1 converted model, 1 unfinished, 1.0 GiB")
    folder = kernel_cache_folder(tmp_path)
    folder.mkdir(parents=True)
    KernelCache(folder).set_filled()
    assert storage.kernel_cache(tmp_path) == ok("filled")


def settings_of(tmp_path: Path, text: str, **environment: str) -> Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return read_settings({"HETERO_EE_CONFIG": str(file), **environment})


def test_configuration(tmp_path: Path) -> None:
    found = configuration.configuration(settings_of(tmp_path, "threads = 2\noffline = true"), None)
    assert found == ok(f"{tmp_path / 'config.toml'}: 2 settings")
    assert configuration.configuration(Settings(tmp_path / "none"), None) == ok(f"{tmp_path / 'none'}: no such file")
    for settings, problem in (
        (settings_of(tmp_path, "threads = 'x'"), None),
        (settings_of(tmp_path, "", HETERO_EE_THREADS="x"), None),
        (Settings(tmp_path), UsageError("threads is x.")),
    ):
        refused = configuration.configuration(settings, problem)
        assert refused.status is Status.FAIL and "x" in refused.text and refused.advice


def test_variables(tmp_path: Path) -> None:
    secret = "hf_abcdefgh"
    assert configuration.variables(Settings(tmp_path)) == ok("no HETERO_EE_ variable is set")
    found = configuration.variables(settings_of(tmp_path, "", HETERO_EE_THREADS="3"))
    assert found == ok("set: HETERO_EE_CONFIG, HETERO_EE_THREADS")
    typo = configuration.variables(settings_of(tmp_path, "", HETERO_EE_THREAD=secret))
    assert typo.status is Status.WARN and typo.text == "unknown: HETERO_EE_THREAD"
    assert typo.advice == "Did you mean HETERO_EE_THREADS?"
    other = configuration.variables(settings_of(tmp_path, "", HETERO_EE_ZZ=secret))
    assert "Known are HETERO_EE_CONFIG, HETERO_EE_MODEL" in other.advice
    assert secret not in str(typo) + str(other)


def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    none = configuration.hugging_face(settings_of(tmp_path, ""))
    assert none.status is Status.OK and none.text.startswith("no token, downloads allowed, cache ")
    secret = "hf_abcdefgh"
    given = configuration.hugging_face(settings_of(tmp_path, "offline = true", HF_TOKEN=secret))
    assert given.text.startswith("a token, offline: nothing is downloaded") and secret not in given.text
    (tmp_path / "token").write_text(secret)
    assert configuration.hugging_face(settings_of(tmp_path, "")).text.startswith("a token")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline" in configuration.hugging_face(settings_of(tmp_path, "")).text


# The runner.


def raising(error: Exception) -> Make:
    def check() -> Finding:
        raise error

    return check


def test_a_check_that_breaks_becomes_a_row_and_the_others_go_on() -> None:
    def late() -> Finding:
        time.sleep(0.05)
        return ok("late")

    rows = examine({"late": late, "broken": raising(RuntimeError("bad\nluck\x1b[0m")), "fine": lambda: ok("fine")})
    assert [(row.name, row.status) for row in rows] == [("late", "ok"), ("broken", "warn"), ("fine", "ok")]
    assert rows[1].finding == "can't be determined (RuntimeError: bad luck [0m)" and rows[1].advice


def test_what_several_checks_ask_for_runs_once() -> None:
    calls: list[int] = []

    def slow() -> int:
        time.sleep(0.05)
        calls.append(1)
        return len(calls)

    asked = once(slow)
    threads = [threading.Thread(target=asked) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (asked(), len(calls)) == (1, 1)


@pytest.mark.parametrize(
    ("home", "user", "text", "shown"),
    [
        ("/home/al", "al", "/home/al/.cache: full", "~/.cache: full"),
        ("/home/al", "al", "/home/al", "~"),
        ("/home/al", "al", "/home/alice/x", "/home/alice/x"),
        ("/home/al", "al", "can't read '/home/al/x'.", "can't read '~/x'."),
        ("/home/al", "al", "/mnt/al/cache, /mnt/al", "/mnt/user/cache, /mnt/user"),
        ("/home/al", "al", "/mnt/alpha/al.txt", "/mnt/alpha/al.txt"),
        ("C:\\Users\\Al", "Al", "C:\\Users\\Al\\cache", "~\\cache"),
        ("/", "root", "/cache", "/cache"),
    ],
)
def test_nobody_is_named(home: str, user: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path(home))
    monkeypatch.setattr(finding.getpass, "getuser", lambda: user)
    assert presentable(text) == shown


def test_a_user_without_a_name_or_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(finding.getpass, "getuser", refuse)
    assert presentable(f"{Path.home()}{os.sep}x") == f"~{os.sep}x"
    monkeypatch.setattr(Path, "home", raising(RuntimeError("Could not determine home directory.")))
    assert presentable("/x") == "/x"
    assert Row("a", Status.OK, "b", "").name == "a"
