"""What is measured, quickly and in full, and when a kept profile is used instead."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling import disturbance, kept
from hetero_ee.profiling import machine_profile as machine_profile_module
from hetero_ee.profiling import measure as profiling
from hetero_ee.profiling.gpu import GpuMetrics
from hetero_ee.profiling.kept import forget_provisional, keep_profile, kept_profile, profile_file
from hetero_ee.profiling.machine_profile import Wanted, known_profile, machine_profile
from hetero_ee.profiling.preset import FULL, QUICK
from hetero_ee.weights.store.filesystem import FileSystem
from hetero_ee_profiles import machine as machine_module
from hetero_ee_profiles.hardware import DeviceTimes, HardwareProfile, Machine
from hetero_ee_profiles.host import memory as memory_module
from hetero_ee_profiles.host import others as others_module
from hetero_ee_profiles.host.memory import MemoryInfo
from hetero_ee_profiles.host.others import OtherPrograms
from hetero_ee_profiles.measurement import Origin, measured
from hetero_ee_profiles.reference import derived_profile
from tests.families import config_of
from tests.shipped import DATA_SHEETS
from tests.stand_in_gpu import StandInGpu
from tests.store_support import FaultyDisk, contents

ORIGIN = Origin("a test", "2026-11-21", "versions")
MACHINE = Machine("a processor", 4, "avx2", 2**34, None, 0, None, "versions")
WITH_GPU = Machine("a processor", 4, "avx2", 2**34, "a card", 2**33, "560.35", "versions")
QUICKLY = Wanted(quick=True, refresh=False, threads=(), command="hetero-ee plan")
FIGURES = derived_profile(DATA_SHEETS[0], "2026-11-21")


class Probes:
    """In place of what measures the CPU and the disk: writes down what it is asked, and answers at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.teams: list[int] = []
        self.budgets_s: list[float] = []
        self.points: list[tuple[tuple[int, int], ...]] = []
        self.models: list[tuple[int, int]] = []
        self.rates, self.disk_rates = [1e9, 1e9, 1e9], [5e8, 6e8, 7e8]
        self.first_rates: list[list[float]] = []  # of the first measurements, in place of rates
        patch.setattr(profiling, "measured_cpu", self.cpu)
        patch.setattr(profiling, "probed_model", self.model)
        patch.setattr(profiling, "probe_disk_bytes_per_s", self.disk_bytes_per_s)

    def model(self, spec: Any, shapes: Any, max_bytes: int, context_tokens: int) -> str:
        self.models.append((max_bytes, context_tokens))
        return "a model"

    def cpu(
        self,
        model: Any,
        points: Any,
        n_threads: int,
        free_bytes: int,
        preset: Any,
        budget_s: float,
        origin: Any,
        clock: Any,
    ) -> DeviceTimes:
        self.teams.append(n_threads)
        self.budgets_s.append(budget_s)
        self.points.append(tuple(points))
        rates = measured(self.first_rates.pop(0) if self.first_rates else self.rates, "B/s", origin)
        return replace(FIGURES.cpu[0], threads=n_threads, free_bytes=free_bytes, read_bytes_per_s=rates)

    def disk_bytes_per_s(self, file: Path, clock: Any) -> list[float]:
        return self.disk_rates


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    return Probes(monkeypatch)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    """Makes this machine that one."""
    return lambda machine: monkeypatch.setattr(machine_module, "this_machine", lambda host, versions: machine)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes so many bytes of memory free."""

    def set_free(n_bytes: int) -> None:
        found = MemoryInfo(2**40, n_bytes, 0, None, None)
        monkeypatch.setattr(memory_module, "memory_info", lambda host: found)

    return set_free


@pytest.fixture
def spec() -> ModelSpec:
    return read_spec(config_of("llama"))


class Asking:
    """machine_profile with a data folder of its own; remarks: what it said besides stages."""

    def __init__(self, spec: ModelSpec, folder: Path, cache: Path) -> None:
        self.spec, self.folder, self._cache = spec, folder, cache
        self.remarks: list[str] = []
        self.stages: list[tuple[int, int]] = []

    def __call__(self, wanted: Wanted = QUICKLY, open_gpu: Any = lambda model: None) -> HardwareProfile:
        self.remarks.clear()
        return machine_profile(
            self.spec,
            wanted,
            data_folder=self.folder,
            cache_folder=self._cache,
            disk_file=None,
            clock=lambda: 0.0,
            open_gpu=open_gpu,
            progress=self.progress,
        )

    def progress(self, stage: str, n_done: int, n_all: int) -> None:
        if n_all:
            self.stages.append((n_done, n_all))
        else:
            self.remarks.append(stage)

    @property
    def file(self) -> Path:
        (found,) = (self.folder / "profiles").iterdir()
        return found


@pytest.fixture
def ask(spec: ModelSpec, tmp_path: Path, cache: Path, probes: Probes, on: Any, free: Any) -> Asking:
    on(MACHINE)
    free(2**30)
    return Asking(spec, tmp_path / "data", cache)


def measure(spec: ModelSpec, threads: Sequence[int] = (1,), preset: Any = QUICK, **more: Any) -> HardwareProfile:
    what: dict[str, Any] = {"free_bytes": 1, "disk_file": None, "clock": lambda: 0.0} | more
    progress = what.pop("progress", None)
    subject = profiling.Subject(MACHINE, **what)
    return profiling.measure_profile(
        spec, subject, ORIGIN, threads=threads, preset=preset, remedy="do this", progress=progress
    )


def test_a_quick_profile(probes: Probes, spec: ModelSpec) -> None:
    found = measure(spec, (4,))
    assert (probes.teams, probes.models) == ([4], [(2**28, 1024)])
    assert probes.points == [((1, 16), (1, 1024), (4, 16), (128, 128), (128, 1024))]
    assert found.cpu[0].threads == 4 and found.gpu is None and found.warnings == ()


def test_a_full_profile(probes: Probes, spec: ModelSpec) -> None:
    found = measure(spec, (4, 1), FULL)
    assert (probes.teams, probes.models) == ([1, 4], [(2**30, 4096)])  # one model for all thread counts
    shortest = {(1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (128, 128), (512, 512)}
    assert set(probes.points[0]) == shortest | {(1, 256), (1, 1024), (1, 4096), (16, 1024), (128, 1024), (512, 2048)}
    assert [times.threads for times in found.cpu] == [1, 4]


def test_thread_counts_share_the_seconds_that_are_left(probes: Probes, spec: ModelSpec) -> None:
    seconds = iter([0.0, 20.0, 20.0, 40.0])
    measure(spec, (1, 2, 3), FULL, clock=lambda: next(seconds))
    whole_s = FULL.cpu_budget_s
    assert probes.budgets_s == [(whole_s - 20) / 3, (whole_s - 20) / 2, whole_s - 40]


def test_progress_counts_threads_disk_and_gpu(probes: Probes, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "measured_gpu", lambda *arguments: GpuMetrics(FIGURES.gpu, FIGURES.link))
    stages: list[tuple[int, int]] = []
    found = measure(spec, (1, 2), gpu=StandInGpu(), progress=lambda stage, done, n: stages.append((done, n)))
    assert stages == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert (found.gpu, found.link) == (FIGURES.gpu, FIGURES.link)


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs beside a measurement counts, as it does for users."""
    monkeypatch.setattr(disturbance, "BUSY_SPREAD", 0.25)


@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("rates, is_busy", [([1e9, 1.1e9, 1.2e9], False), ([1e9, 1.2e9, 1.5e9], True)])
def test_a_busy_machine_is_told_of(probes: Probes, spec: ModelSpec, rates: list[float], is_busy: bool) -> None:
    probes.rates = rates
    warnings = measure(spec, (2,)).warnings
    assert len(warnings) == is_busy
    words = "with 2 threads memory was read at 1.0 to 1.5 GB/s: something else was running; do this"
    assert not is_busy or warnings == (words,)


def test_the_disk(probes: Probes, spec: ModelSpec, tmp_path: Path) -> None:
    assert measure(spec).disk_read_bytes_per_s.count == 0
    assert measure(spec, disk_file=tmp_path).disk_read_bytes_per_s.value == 6e8
    probes.disk_rates = []
    assert measure(spec, disk_file=tmp_path).disk_read_bytes_per_s.count == 0


def test_a_profile_is_kept_and_used_again(ask: Asking, probes: Probes) -> None:
    first = ask()
    assert probes.teams == [4] and ask.remarks == [] and ask.file.name.endswith("-quick.json")
    assert ask() == first and probes.teams == [4]


def test_free_memory_is_asked_anew(ask: Asking, probes: Probes, free: Any) -> None:
    assert ask().cpu[0].free_bytes == 2**30
    free(2**20)
    assert ask().cpu[0].free_bytes == 2**20 and probes.teams == [4]


def test_a_full_profile_serves_quick_wishes_and_not_the_reverse(ask: Asking, probes: Probes) -> None:
    full = Wanted(False, False, (), "hetero-ee profile")
    ask()
    ask(full)
    assert probes.teams == [4, 1, 4]
    assert [times.threads for times in ask().cpu] == [1, 4] and probes.teams == [4, 1, 4]


def test_refresh_measures_again(ask: Asking, probes: Probes) -> None:
    ask()
    ask(Wanted(True, True, (), ""))
    assert probes.teams == [4, 4]


def test_threads_that_a_kept_profile_lacks_are_measured(ask: Asking, probes: Probes) -> None:
    ask()
    found = ask(Wanted(True, False, (2, 3), ""))
    assert probes.teams == [4, 2, 3, 4] and [times.threads for times in found.cpu] == [2, 3, 4]
    ask(Wanted(True, False, (3,), ""))
    assert len(probes.teams) == 4


def test_another_machine_or_model_has_a_profile_of_its_own(ask: Asking, probes: Probes, on: Any) -> None:
    ask()
    on(WITH_GPU)
    ask()
    ask.spec = read_spec(config_of("qwen3"))
    ask()
    assert len(probes.teams) == len(list((ask.folder / "profiles").iterdir())) == 3


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "cut off": (lambda body: json.dumps(body)[:-9], "can't be used"),
    "another version": (lambda body: json.dumps(body | {"version": 99}), "profile version 99"),
    "a foreign machine": (
        lambda body: json.dumps(body | {"machine": body["machine"] | {"n_cores": 5}}),
        "of another machine or version",
    ),
    "derived": (lambda body: json.dumps(body | {"kind": "derived"}), "of another machine or version"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_kept_profile_that_does_not_fit_is_measured_again(ask: Asking, probes: Probes, name: str) -> None:
    change, words = DAMAGES[name]
    ask()
    ask.file.write_text(change(json.loads(ask.file.read_text())))
    again = ask()
    (remark,) = ask.remarks
    assert words in remark and str(ask.file) in remark and remark.endswith("measuring again")
    assert ask() == again and probes.teams == [4, 4]


def test_a_profile_that_can_not_be_kept_is_used(ask: Asking, probes: Probes) -> None:
    ask.folder.write_text("a file in the folder's place")
    assert ask().cpu[0].threads == 4
    assert len(ask.remarks) == 1 and "can't be kept" in ask.remarks[0] and ask.folder.is_file()


def test_what_is_kept_lies_where_it_is_looked_for(spec: ModelSpec, tmp_path: Path, probes: Probes) -> None:
    profile = measure(spec)
    file = keep_profile(tmp_path, profile, spec, quick=True)
    assert file == profile_file(tmp_path, MACHINE, spec, quick=True)
    assert kept_profile(tmp_path, MACHINE, spec, quick_will_do=True) == (profile, "")
    assert kept_profile(tmp_path, MACHINE, spec, quick_will_do=False) == (None, "")


@pytest.fixture
def with_figures(ask: Asking, on: Any, monkeypatch: pytest.MonkeyPatch) -> Asking:
    """On a machine with a GPU whose measurement takes no time."""
    on(WITH_GPU)
    monkeypatch.setattr(profiling, "measured_gpu", lambda *arguments: GpuMetrics(FIGURES.gpu, FIGURES.link))
    return ask


def test_free_memory_of_the_gpu_is_asked_anew(with_figures: Asking) -> None:
    first = with_figures(open_gpu=lambda model: StandInGpu(1000))
    assert first.gpu == FIGURES.gpu
    for n_bytes in (2000, 500):
        again = with_figures(open_gpu=lambda model, n_bytes=n_bytes: StandInGpu(n_bytes))
        assert again.gpu is not None and again.gpu.free_bytes == n_bytes and again.link == first.link
    assert with_figures.remarks == []


def test_a_gpu_that_torch_can_not_use_is_told_of_each_time(ask: Asking, on: Any) -> None:
    on(WITH_GPU)

    def refuse(model: str | None) -> None:
        raise RuntimeError(f"torch for the CPU only can't use {model}")

    for _ in range(2):
        found = ask(open_gpu=refuse)
        assert found.gpu is None and ask.remarks == ["the GPU is left out: torch for the CPU only can't use a card"]


def test_a_gpu_that_goes_away_takes_its_figures_along(with_figures: Asking) -> None:
    with_figures(open_gpu=lambda model: StandInGpu())
    found = with_figures(open_gpu=lambda model: StandInGpu(fail="free_bytes"))
    assert found.gpu is found.link is None and "the GPU can't be used now" in with_figures.remarks[-1]
    back = with_figures(open_gpu=lambda model: StandInGpu(77))
    assert back.gpu is not None and back.gpu.free_bytes == 77


FULLY = Wanted(quick=False, refresh=False, threads=(), command="hetero-ee profile")
AGAIN = Wanted(quick=True, refresh=True, threads=(), command="hetero-ee profile")
QUIET, BUSY, BUSIER = [1e9, 1e9, 1e9], [1e9, 1.2e9, 1.5e9], [1e9, 1.2e9, 1.9e9]
COMMAND = "`hetero-ee profile --refresh MODEL` measures again"


@dataclass(frozen=True)
class StandInPrograms:
    cores: float = 0.0

    def busy_cores(self) -> float:
        return self.cores


def p80(profile: HardwareProfile) -> float:
    return profile.cpu[0].read_bytes_per_s.p80


@pytest.fixture
def disturbed(ask: Asking, probes: Probes, watchful: None) -> Asking:
    """On a machine on which something else is always running."""
    probes.rates = BUSY
    return ask


def test_a_disturbed_measurement_is_made_once_more_at_once(ask: Asking, probes: Probes, watchful: None) -> None:
    probes.first_rates = [BUSY]
    found = ask()
    assert probes.teams == [4, 4] and found.warnings == () and ask.file.suffix == ".json"
    first, second = ask.remarks
    assert "at 1.0 to 1.5 GB/s: something else is running; measuring once more" in first
    assert second == "Nothing disturbed the second measurement, which is used"
    assert ask() == found and probes.teams == [4, 4]


def test_a_full_profile_is_not_made_twice_at_once(disturbed: Asking, probes: Probes) -> None:
    disturbed(FULLY)
    assert probes.teams == [1, 4]


def test_a_disturbed_profile_is_used_and_not_kept(disturbed: Asking, probes: Probes, cache: Path) -> None:
    probes.first_rates = [BUSY, BUSIER]
    found = disturbed()
    assert p80(found) == 1.5e9 and COMMAND in found.warnings[0]
    assert disturbed.remarks[-1].endswith("not kept: the next run measures again")
    assert kept_profile(disturbed.folder, MACHINE, disturbed.spec, quick_will_do=True) == (None, "")
    folders = {"data_folder": disturbed.folder, "cache_folder": cache}
    assert known_profile(disturbed.spec, 4, **folders, open_gpu=lambda model: None) is None
    probes.rates = QUIET
    again = disturbed()
    assert probes.teams == [4, 4, 4] and again.warnings == () and p80(again) == 1e9
    assert disturbed.file.suffix == ".json"  # and nothing beside it
    assert disturbed() == again and probes.teams == [4, 4, 4]


def test_a_program_that_runs_all_the_time_is_noticed(
    ask: Asking, probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rates agree, and are a third of what they were: by its processor time, and by an earlier profile."""
    monkeypatch.setattr(disturbance, "BUSY_SHARE", 0.25)
    monkeypatch.setattr(machine_profile_module, "OtherPrograms", lambda: StandInPrograms(2.5))
    probes.rates = [3e8] * 3
    ask()
    assert "other programs kept 2.5 of 4 cores busy: something else is running" in ask.remarks[0]
    found = ask()
    assert found.doubts == ("other programs kept 2.5 of 4 cores busy",) and ask().doubts == found.doubts
    assert ask.file.suffix == ".json" and len(probes.teams) == 4  # kept, after two runs, but provisional

    monkeypatch.setattr(machine_profile_module, "OtherPrograms", lambda: StandInPrograms(0.1))
    probes.rates = QUIET
    assert ask(AGAIN).doubts == () and ask().cpu[0].read_bytes_per_s.value == 1e9
    monkeypatch.setattr(disturbance, "SLOW_SHARE", 0.7)
    probes.rates = [3e8] * 3
    ask.spec = read_spec(config_of("qwen3"))
    assert ask().doubts == ("with 4 threads memory was read at 0.3 GB/s, earlier at 1.0",)


def test_a_provisional_profile_is_forgotten_and_no_other(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    good = ask()
    assert not forget_provisional(ask.folder, good, ask.spec) and ask() == good
    doubted = replace(good, doubts=("other programs kept 2.5 of 4 cores busy",))
    keep_profile(ask.folder, doubted, ask.spec, quick=True)
    assert ask() == doubted and forget_provisional(ask.folder, doubted, ask.spec)
    assert ask() == good  # measured again


def test_other_programs_are_all_but_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(10.0, 100.0, 5.0), (12.0, 106.0, 8.0), (14.0, 106.0, 9.0)])  # by the clock, of all, of this one
    monkeypatch.setattr(others_module, "_times_s", lambda: next(times))
    others = OtherPrograms()
    assert others.busy_cores() == 1.5 and others.busy_cores() == 0.5
    monkeypatch.undo()
    assert OtherPrograms().busy_cores() >= 0


@pytest.mark.parametrize("then, best", [(BUSIER, 1.5e9), ([1e9, 1.2e9, 1.4e9], 1.4e9)])
def test_on_a_machine_that_is_always_busy_the_least_disturbed_is_kept(
    disturbed: Asking, probes: Probes, then: list[float], best: float
) -> None:
    disturbed()
    probes.rates = then
    found = disturbed()
    assert p80(found) == best and probes.teams == [4, 4, 4, 4]
    assert (
        disturbed.remarks[-1].startswith("The least disturbed profile of two runs is kept")
        and COMMAND in (disturbed.remarks[-1])
    )
    assert disturbed() == found and disturbed.remarks == [] and probes.teams == [4, 4, 4, 4]


def test_a_profile_for_fewer_threads_is_not_the_least_disturbed(disturbed: Asking, probes: Probes) -> None:
    disturbed()
    probes.rates = BUSIER
    found = disturbed(replace(QUICKLY, threads=(2,)))
    assert [times.threads for times in found.cpu] == [2, 4] and p80(found) == 1.9e9


def test_a_disturbed_refresh_leaves_the_good_profile_until_it_is_asked_for_again(ask: Asking, probes: Probes) -> None:
    good = ask()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disturbance, "BUSY_SPREAD", 0.25)
        probes.rates = BUSY
        assert p80(ask(AGAIN)) == 1.5e9 and ask() == good
        assert p80(ask(AGAIN)) == 1.5e9 and p80(ask()) == 1.5e9


def test_a_damaged_disturbed_profile_is_replaced(disturbed: Asking) -> None:
    disturbed()
    disturbed.file.write_text("{")
    assert p80(disturbed()) == 1.5e9 and disturbed.file.suffix == ".json"


def test_more_threads_than_cores_are_warned_of(ask: Asking) -> None:
    ask(replace(QUICKLY, threads=(4, 2)))
    assert ask.remarks == []
    for _ in range(2):  # measured, and found
        ask(replace(QUICKLY, threads=(9, 2)))
        assert ask.remarks == ["9 threads share 4 physical cores; 4 threads are usually faster"]


def test_the_time_it_takes_is_said_first(ask: Asking) -> None:
    said: list[str] = []
    ask.progress = lambda stage, n_done, n_all: said.append(stage)  # type: ignore[method-assign]
    ask()
    ask(FULLY)
    assert "about 5 seconds" in said[0] and "up to 3 minutes" in said[-1]


def test_on_a_disk_without_locks_nobody_waits(ask: Asking, probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(FileSystem, "acquire_lock", refuse)
    ask()
    assert ask() and probes.teams == [4]


def test_two_processes_that_keep_a_profile_at_once_do_not_mix(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk without locks: the other one writes while this one has written half."""
    first = ask()
    other, good = replace(first, name="other"), contents(ask.folder)

    class Interrupted(FileSystem):
        def write(self, file: Any, data: bytes | memoryview) -> None:
            super().write(file, data[: len(data) // 2])
            monkeypatch.setattr(kept, "FileSystem", FileSystem)
            keep_profile(ask.folder, other, ask.spec, quick=True)
            super().write(file, data[len(data) // 2 :])

    monkeypatch.setattr(kept, "FileSystem", Interrupted)
    keep_profile(ask.folder, first, ask.spec, quick=True)
    assert contents(ask.folder) == good


@pytest.mark.parametrize("is_locked", [True, False])
def test_what_killed_processes_left_is_removed_under_the_lock_alone(
    ask: Asking, monkeypatch: pytest.MonkeyPatch, is_locked: bool
) -> None:
    ask()
    left = ask.folder / "profiles" / "profile.json.1-ab.new"
    left.touch()

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    if not is_locked:
        monkeypatch.setattr(FileSystem, "acquire_lock", refuse)
    ask(AGAIN)
    assert left.exists() is not is_locked


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("rates", [[1e9, 1e9, 1e9], [1e9, 1.2e9, 1.5e9]], ids=["quiet", "disturbed"])
@pytest.mark.sample(1)
def test_a_disk_that_fails_at_any_call_leaves_whole_profiles(
    ask: Asking, probes: Probes, watchful: None, monkeypatch: pytest.MonkeyPatch, code: int, lasting: bool, rates: Any
) -> None:
    """What was measured is used, a remark says why it can't be kept, and the former profile or the new one is there."""
    probes.rates = [2e9, 2e9, 2e9]
    ask(AGAIN)
    probes.rates, good, failed = rates, contents(ask.folder), set()
    for fail_at in range(1, 100):
        disk = FaultyDisk(fail_at, OSError(code, os.strerror(code)), lasting=lasting)
        with monkeypatch.context() as patch:
            for module in (kept, machine_profile_module):
                patch.setattr(module, "FileSystem", lambda disk=disk: disk)
            assert ask(AGAIN).cpu[0].read_bytes_per_s.p20 == 1e9
        if len(disk.calls) < fail_at:
            break
        call = disk.calls[fail_at - 1]
        failed.add(call)
        is_told = any("can't be kept" in remark and os.strerror(code) in remark for remark in ask.remarks)
        if call in ("create_file", "write", "close_durably", "rename"):
            assert is_told and {name: contents(ask.folder).get(name) for name in good} == good
        probes.rates = [2e9, 2e9, 2e9]
        ask(AGAIN)
        probes.rates = rates
        left = contents(ask.folder).keys() - good.keys()  # nothing, but where the disk refused to remove it too
        assert not [name for name in left if not (lasting and name.endswith(".new"))], f"call {fail_at}, {call}"
    assert {"acquire_lock", "create_file", "write", "close_durably", "rename"} <= failed


def test_a_folder_of_profiles_that_can_not_be_looked_into(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", refuse)
        assert ask().cpu[0].threads == 4
    assert any("Permission denied" in remark for remark in ask.remarks)
