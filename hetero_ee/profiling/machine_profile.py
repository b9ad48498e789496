"""This machine's profile for a model: kept from before, or measured now and kept."""

import datetime
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee_profiles.gpu.platform import GpuPlatform, cuda_platform
from hetero_ee_profiles.hardware import HardwareProfile

# A new version of one of them may run at another speed, and another build of torch may see another GPU.
MEASURED_WITH = ("hetero-ee", "numba", "llvmlite", "numpy", "torch", "triton")
OpenGpu = Callable[[str | None], GpuPlatform | None]  # see cuda_platform


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which profile is asked for. quick: some seconds and rough. refresh: measured again whatever is kept. threads:
    counts to measure besides all cores, and one alone in a full profile. command: what asked, for the record."""

    quick: bool
    refresh: bool
    threads: tuple[int, ...]
    command: str


def machine_profile(
    spec: ModelSpec,
    wanted: Wanted,
    *,
    data_folder: Path,
    cache_folder: Path,
    disk_file: Path | None,
    clock: Callable[[], float],
    open_gpu: OpenGpu = cuda_platform,
    progress: Progress | None = None,
) -> HardwareProfile:
    """The profile of this machine at the model's shapes; a kept one where it is of this very machine and versions.

    How much memory is free, on the GPU too, is asked again each time. Why a profile is measured, and why the GPU is
    left out, goes to `progress` as a remark (0 in all). A profile that can't be kept is used all the same. Raises
    StoreError where the kernels have nowhere to lie.
    """
    use_kernel_cache(cache_folder)
    # The kernels look where to be cached when imported.
    from hetero_ee.profiling.gpu import with_free_memory
    from hetero_ee.profiling.measure import measure_profile
    from hetero_ee.profiling.preset import FULL, QUICK
    from hetero_ee.profiling.profile_store import keep_profile, kept_profile
    from hetero_ee_profiles.host.host import this_host
    from hetero_ee_profiles.host.memory import memory_info
    from hetero_ee_profiles.machine import this_machine
    from hetero_ee_profiles.measurement import Origin

    host = this_host()
    machine, free_bytes = this_machine(host, versions()), memory_info(host).available_bytes
    gpu, gpu_problem = _opened(open_gpu, machine.gpu_model)
    remark = progress or (lambda stage, done, in_all: None)
    kept, problem = kept_profile(data_folder, machine, spec, quick_will_do=wanted.quick)
    counts = {machine.n_cores, *wanted.threads, *([] if wanted.quick else [1])}
    known = {times.threads for times in kept.cpu} if kept else set()
    if kept is not None and not wanted.refresh and counts <= known:
        found = with_free_memory(_with_free_ram(kept, free_bytes), gpu, gpu_problem)
        if machine.gpu_model is not None and found.gpu is None:
            for warning in found.warnings:
                remark(warning, 0, 0)
        return found
    if problem:
        remark(f"{problem}; measuring again", 0, 0)
    profile = measure_profile(
        spec,
        machine,
        Origin(wanted.command, datetime.date.today().isoformat(), versions()),
        threads=sorted(counts | known),  # what was measured once stays known
        free_bytes=free_bytes,
        preset=QUICK if wanted.quick else FULL,
        disk_file=disk_file,
        clock=clock,
        gpu=gpu,
        gpu_problem=gpu_problem,
        progress=progress,
    )
    for warning in profile.warnings:
        remark(warning, 0, 0)
    try:
        keep_profile(data_folder, profile, spec, quick=wanted.quick)
    except OSError as error:
        remark(f"the profile can't be kept ({error}); it will be measured again", 0, 0)
    return profile


def known_profile(
    spec: ModelSpec,
    threads: int,
    *,
    data_folder: Path,
    cache_folder: Path,
    open_gpu: OpenGpu = cuda_platform,
) -> HardwareProfile | None:
    """What machine_profile would find without measuring, for this number of threads; None where that is nothing."""
    if not any((data_folder / "profiles").glob("*.json")):
        return None
    use_kernel_cache(cache_folder)
    # The kernels look where to be cached when imported.
    from hetero_ee.profiling.gpu import with_free_memory
    from hetero_ee.profiling.profile_store import kept_profile
    from hetero_ee_profiles.host.host import this_host
    from hetero_ee_profiles.host.memory import memory_info
    from hetero_ee_profiles.machine import this_machine

    host = this_host()
    machine = this_machine(host, versions())
    kept, _ = kept_profile(data_folder, machine, spec, quick_will_do=True)
    if kept is None or all(times.threads != threads for times in kept.cpu):
        return None
    found = _with_free_ram(kept, memory_info(host).available_bytes)
    return found if kept.gpu is None else with_free_memory(found, *_opened(open_gpu, machine.gpu_model))


def _with_free_ram(profile: HardwareProfile, free_bytes: int) -> HardwareProfile:
    return replace(profile, cpu=tuple(replace(times, free_bytes=free_bytes) for times in profile.cpu))


def versions() -> str:
    """Python, the engine and what compiles its kernels, with their versions, in one line."""
    return ", ".join([f"python {platform.python_version()}", *filter(None, map(_with_version, MEASURED_WITH))])


def _with_version(name: str) -> str:
    """Empty where the package is not installed, as Triton is not everywhere."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _opened(open_gpu: OpenGpu, model: str | None) -> tuple[GpuPlatform | None, str]:
    """The GPU, or why there is none, empty where that is no surprise."""
    from hetero_ee.profiling.gpu import reason  # brings the kernels, see above

    try:
        return open_gpu(model), ""
    except RuntimeError as error:
        return None, f"the GPU is left out: {reason(error)}"
