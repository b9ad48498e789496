"""This machine's profile for a model: kept from before, or measured now and kept.

One file for each machine, set of shapes and preset; a foreign or damaged one is never used.
"""

import datetime
import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.preset import FULL, QUICK, product_shapes
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee_profiles.gpu.platform import GpuPlatform, cuda_platform
from hetero_ee_profiles.hardware import MEASURED, HardwareProfile, Machine
from hetero_ee_profiles.measurement import Origin
from hetero_ee_profiles.records import read_record, write_record

# A new version of one of them may run at another speed, and another build of torch may see another GPU.
MEASURED_WITH = ("hetero-ee", "numba", "llvmlite", "numpy", "torch", "triton")
MAX_REASON = 200  # characters of what a driver says
WAY_OUT = "plans use the CPU alone; `hetero-ee doctor` says more, `hetero-ee profile --refresh` measures again"
OpenGpu = Callable[[str | None], GpuPlatform | None]  # see cuda_platform


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which profile is asked for."""

    quick: bool  # some seconds and rough
    refresh: bool  # measured again whatever is kept
    threads: tuple[int, ...]  # counts to measure besides all cores, and besides one alone in a full profile
    command: str  # what asked, for the record


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
    from hetero_ee.profiling.measure import measure_profile  # the kernels look where to be cached when imported

    machine, free_bytes = _this_machine()
    gpu, gpu_problem = _opened(open_gpu, machine.gpu_model)
    remark = progress or (lambda *_: None)
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
    machine, free_bytes = _this_machine()
    kept, _ = kept_profile(data_folder, machine, spec, quick_will_do=True)
    if kept is None or all(times.threads != threads for times in kept.cpu):
        return None
    found = _with_free_ram(kept, free_bytes)
    return found if kept.gpu is None else with_free_memory(found, *_opened(open_gpu, machine.gpu_model))


def profile_file(folder: Path, machine: Machine, spec: ModelSpec, *, quick: bool) -> Path:
    """Where the profile of this machine for a model of these shapes lies, or would lie."""
    shapes = [asdict(shape) for shape in product_shapes(spec)]
    heads = spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim
    identity = json.dumps([asdict(machine), shapes, heads], sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return folder / "profiles" / f"{key}-{'quick' if quick else 'full'}.json"


def kept_profile(
    folder: Path, machine: Machine, spec: ModelSpec, *, quick_will_do: bool
) -> tuple[HardwareProfile | None, str]:
    """The profile measured before, the full one first, and why there is none: a sentence, empty where nothing is wrong.

    A file that can't be read, is of another version or of another machine is left alone and not used.
    """
    problem = ""
    for quick in (False, True) if quick_will_do else (False,):
        file = profile_file(folder, machine, spec, quick=quick)
        if not file.exists():
            continue
        try:
            found = read_record(HardwareProfile, file)
        except (OSError, ValueError) as error:
            problem = f"the profile {file} can't be used ({error})"
            continue
        if found.kind == MEASURED and found.machine == machine:
            return found, ""
        problem = f"the profile {file} is of another machine or version"
    return None, problem


def keep_profile(folder: Path, profile: HardwareProfile, spec: ModelSpec, *, quick: bool) -> Path:
    """Writes the profile where kept_profile finds it; returns where. Raises OSError."""
    file = profile_file(folder, profile.machine, spec, quick=quick)
    write_record(profile, file)
    return file


def _this_machine() -> tuple[Machine, int]:
    """The machine and its free memory in bytes."""
    from hetero_ee_profiles.host.host import this_host
    from hetero_ee_profiles.host.memory import memory_info
    from hetero_ee_profiles.machine import this_machine

    host = this_host()
    return this_machine(host, versions()), memory_info(host).available_bytes


def with_free_memory(profile: HardwareProfile, platform: GpuPlatform | None, problem: str = "") -> HardwareProfile:
    """A profile from before with what is free on the GPU now; without GPU where that can't be used any more.

    problem: why platform is None.
    """
    if profile.gpu is None:
        return profile
    try:
        if platform is None:
            raise RuntimeError(problem or "torch finds none")
        with platform.current():
            return replace(profile, gpu=replace(profile.gpu, free_bytes=platform.free_bytes()))
    except RuntimeError as error:
        warning = f"the GPU can't be used now ({reason(error)}); {WAY_OUT}"
        return replace(profile, gpu=None, link=None, warnings=(*profile.warnings, warning))


def reason(error: BaseException) -> str:
    """The error's first line, fit for a terminal."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "..."


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
    try:
        return open_gpu(model), ""
    except RuntimeError as error:
        return None, f"the GPU is left out: {reason(error)}"
