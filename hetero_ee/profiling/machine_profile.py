"""Returns this machine's profile for a model, kept on disk or measured now. Only one process measures at a time."""

import datetime
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.disturbance import disturbance, doubts
from hetero_ee.profiling.kept import FOLDER, best_read_rates, keep_unless_disturbed, kept_profile, remove_unfinished
from hetero_ee.profiling.preset import FULL, QUICK
from hetero_ee.profiling.problems import REFRESH, WITHOUT_GPU, reason
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee_profiles.gpu.platform import GpuPlatform, cuda_platform
from hetero_ee_profiles.hardware import HardwareProfile, Machine
from hetero_ee_profiles.host.others import OtherPrograms
from hetero_ee_profiles.host.process import processor_count, surplus_threads
from hetero_ee_profiles.measurement import Origin
from hetero_ee_profiles.probe_samples import Clock

# Another version may run at another speed, and another build of torch may find another GPU.
MEASURED_WITH = ("hetero-ee", "numba", "llvmlite", "numpy", "torch", "triton")
WAITING = "Another hetero-ee is measuring this machine; waiting for it"
LOCK_FILE = "measuring.lock"  # for the whole machine, as any two measurements disturb each other
OpenGpu = Callable[[str | None], GpuPlatform | None]  # see cuda_platform


@dataclass(frozen=True, slots=True)
class Wanted:
    quick: bool  # rough, in some seconds
    refresh: bool  # measured again even if one is kept
    threads: tuple[int, ...]  # counts to measure besides all cores, all hardware threads and, in a full one, 1
    command: str  # the caller, for the record


def machine_profile(
    spec: ModelSpec,
    wanted: Wanted,
    *,
    data_folder: Path,
    cache_folder: Path,
    disk_file: Path | None,
    clock: Clock,
    open_gpu: OpenGpu = cuda_platform,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Return the profile of this machine at the model's shapes.

    A kept profile is used if machine and versions are the same; only free memory is queried again. A new profile is
    used even if it can't be kept, or if another program disturbed it.

    Args:
        progress: also receives remarks, with a total of 0: why a profile is measured, and why the GPU is left out.

    Raises:
        StoreError: if the compiled kernels can't be stored.
    """
    use_kernel_cache(cache_folder)
    remark = progress or (lambda *_: None)
    machine, free_bytes = _this_machine()
    gpu, gpu_problem = _opened(open_gpu, machine.gpu_model)
    if problem := surplus_threads(max(wanted.threads, default=0), machine.n_cores):
        remark(problem, 0, 0)
    search = _Search(spec, wanted, data_folder, machine, free_bytes, gpu, gpu_problem, remark)
    if (found := search.kept()) is not None:
        return found
    with _measuring_alone(data_folder, remark):
        # Another process may have measured the same meanwhile.
        return search.kept() or search.measured(disk_file, clock)


@dataclass(frozen=True, slots=True)
class _Search:
    """Inputs of one call of machine_profile, and the two ways to get a profile."""

    spec: ModelSpec
    wanted: Wanted
    data_folder: Path
    machine: Machine
    free_bytes: int
    gpu: GpuPlatform | None
    gpu_problem: str
    remark: Progress

    def kept(self) -> HardwareProfile | None:
        """Return the kept profile with the memory that is free now; None if it is missing or lacks a thread count."""
        found, _ = self._on_disk()
        if found is None or self.wanted.refresh or not self._counts <= _counts(found):
            return None
        found = with_free_memory(_with_free_ram(found, self.free_bytes), self.gpu, self.gpu_problem)
        if self.machine.gpu_model is not None and found.gpu is None:
            self._say(found.warnings)
        return found

    def measured(self, disk_file: Path | None, clock: Clock) -> HardwareProfile:
        """Measure a profile now, and keep it unless another program disturbed it."""
        kept, problem = self._on_disk()
        if problem:
            self._say([f"{problem}; measuring again"])
        known = _counts(kept) if kept else set()  # thread counts measured before are measured again
        found = self._least_disturbed(sorted(self._counts | known), disk_file, clock)
        self._say(found.warnings)
        try:
            found, is_kept = keep_unless_disturbed(self.data_folder, found, self.spec, quick=self.wanted.quick)
        except OSError as error:
            self._say([f"the profile can't be kept ({error}); it will be measured again"])
            return found
        if not is_kept:
            self._say(["This profile is used now and not kept: the next run measures again"])
        elif found.doubts:
            self._say([f"The least disturbed profile of two runs is kept; {REFRESH} on a quiet machine"])
        return found

    @property
    def _counts(self) -> set[int]:
        """Thread counts that the profile must have."""
        n_cores = self.machine.n_cores
        return {n_cores, max(n_cores, processor_count()), *self.wanted.threads, *([] if self.wanted.quick else [1])}

    def _on_disk(self) -> tuple[HardwareProfile | None, str]:
        return kept_profile(self.data_folder, self.machine, self.spec, quick_will_do=self.wanted.quick)

    def _least_disturbed(self, threads: list[int], disk_file: Path | None, clock: Clock) -> HardwareProfile:
        """Measure until a profile is undisturbed or the preset's attempts are used up, and return the best profile."""
        from hetero_ee.profiling.measure import (  # compiled kernels, whose cache is chosen first
            Subject,
            measure_profile,
        )

        wanted, preset = self.wanted, QUICK if self.wanted.quick else FULL
        subject = Subject(self.machine, self.free_bytes, disk_file, clock, self.gpu, self.gpu_problem)
        origin = Origin(wanted.command, datetime.date.today().isoformat(), versions())
        found: list[HardwareProfile] = []
        for attempt in range(preset.attempts):
            if attempt:
                self._say([f"{'; '.join(found[0].doubts)}: something else is running; measuring once more"])
            others = OtherPrograms()
            profile = measure_profile(
                self.spec, subject, origin, threads=threads, preset=preset, remedy=REFRESH, progress=self.remark
            )
            known = best_read_rates(self.data_folder, self.machine)
            found.append(replace(profile, doubts=doubts(profile, others.busy_cores(), known)))
            if not found[-1].doubts:
                self._say(["Nothing disturbed the second measurement, which is used"] if attempt else [])
                break
        return min(found, key=lambda profile: (bool(profile.doubts), disturbance(profile)))

    def _say(self, remarks: Sequence[str]) -> None:
        for each in remarks:
            self.remark(each, 0, 0)


@contextmanager
def _measuring_alone(folder: Path, remark: Progress) -> Iterator[None]:
    """Wait until no other process or thread measures. If the disk has no locks, do not wait."""
    lock = None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileSystem().acquire_lock(folder / LOCK_FILE, lambda: remark(WAITING, 0, 0))
        remove_unfinished(folder)
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):  # the lock ends with this process
                lock.release()


def known_profile(
    spec: ModelSpec,
    threads: int,
    *,
    data_folder: Path,
    cache_folder: Path,
    open_gpu: OpenGpu = cuda_platform,
) -> HardwareProfile | None:
    """Return the kept profile as machine_profile would, but never measure; None if it lacks this thread count."""
    if not any((data_folder / FOLDER).glob("*.json")):
        return None
    use_kernel_cache(cache_folder)
    machine, free_bytes = _this_machine()
    kept, _ = kept_profile(data_folder, machine, spec, quick_will_do=True)
    if kept is None or threads not in _counts(kept):
        return None
    found = _with_free_ram(kept, free_bytes)
    return found if kept.gpu is None else with_free_memory(found, *_opened(open_gpu, machine.gpu_model))


def _this_machine() -> tuple[Machine, int]:
    """Return the description of this machine, and its free RAM in bytes."""
    from hetero_ee_profiles.host.host import this_host
    from hetero_ee_profiles.host.memory import memory_info
    from hetero_ee_profiles.machine import this_machine

    host = this_host()
    return this_machine(host, versions()), memory_info(host).available_bytes


def _counts(profile: HardwareProfile) -> set[int]:
    return {times.threads for times in profile.cpu}


def with_free_memory(profile: HardwareProfile, platform: GpuPlatform | None, problem: str = "") -> HardwareProfile:
    """Return a kept profile with the VRAM that is free now, or without the GPU if it can no longer be used.

    Args:
        platform: the GPU; None if it can't be used, for the reason `problem`.
    """
    if profile.gpu is None:
        return profile
    try:
        if platform is None:
            raise RuntimeError(problem or "torch finds none")
        with platform.current():
            return replace(profile, gpu=replace(profile.gpu, free_bytes=platform.free_bytes()))
    except RuntimeError as error:
        warning = f"the GPU can't be used now ({reason(error)}); {WITHOUT_GPU}"
        return replace(profile, gpu=None, link=None, warnings=(*profile.warnings, warning))


def _with_free_ram(profile: HardwareProfile, free_bytes: int) -> HardwareProfile:
    return replace(profile, cpu=tuple(replace(times, free_bytes=free_bytes) for times in profile.cpu))


def versions() -> str:
    """Return the versions of Python, the engine and its compilers as one line of text."""
    return ", ".join([f"python {platform.python_version()}", *filter(None, map(_with_version, MEASURED_WITH))])


def _with_version(name: str) -> str:
    """Return a package's name and version, or "" if it is not installed, as Triton may be."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _opened(open_gpu: OpenGpu, model: str | None) -> tuple[GpuPlatform | None, str]:
    """Return the GPU, or None and the reason, which is "" if the machine simply has no GPU."""
    try:
        return open_gpu(model), ""
    except RuntimeError as error:
        return None, f"the GPU is left out: {reason(error)}"
