"""Measures this machine for one model."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.registry import Registry
from hetero_ee.profiling.cpu import measured_cpu, probed_model
from hetero_ee.profiling.disturbance import disturbances
from hetero_ee.profiling.gpu import GpuMetrics, GpuProbe, measured_gpu
from hetero_ee.profiling.preset import Preset, attention_points, product_shapes
from hetero_ee.profiling.rows import cpu_rows
from hetero_ee_profiles.disk_probe import probe_disk_bytes_per_s
from hetero_ee_profiles.gpu.platform import GpuPlatform
from hetero_ee_profiles.hardware import (
    MEASURED,
    PROFILE_VERSION,
    HardwareProfile,
    Machine,
)
from hetero_ee_profiles.measurement import Measurement, Origin, derived, measured
from hetero_ee_profiles.probe_samples import Clock

ASSUMED_DISK_BYTES_PER_S = 1e9  # if there is no file to read


@dataclass(frozen=True, slots=True)
class Subject:
    """The machine to measure, and the means to do so."""

    machine: Machine
    free_bytes: int  # of RAM
    disk_file: Path | None  # to read, if there is one
    clock: Clock
    gpu: GpuPlatform | None = None  # None leaves it out
    gpu_problem: str = ""  # why it is left out; empty if there simply isn't one
    registry: Registry | None = None  # of the GPU's kernels; None for the installed ones


def profiling_stage(preset: Preset) -> str:
    """Return the name of the measurement that progress reports show."""
    return f"Measuring this machine for {preset.duration}, to plan for it and say what to expect"


def measure_profile(
    spec: ModelSpec,
    subject: Subject,
    origin: Origin,
    *,
    threads: Sequence[int],
    preset: Preset,
    remedy: str = "",
    progress: Progress | None = None,
) -> HardwareProfile:
    """Measure the CPU at the model's shapes with each thread count, the disk, the GPU and the link.

    For sparse FFNs, products with rows of neurons are timed too. If the GPU fails, the profile has a warning instead.

    Args:
        remedy: advice that ends warnings about a disturbed measurement.

    Raises:
        OSError: if the disk or the operating system refuses.
    """
    sparse, spec = spec if spec.neuron_major else None, replace(spec, neuron_major=False)
    clock, gpu, free_bytes = subject.clock, subject.gpu, subject.free_bytes
    spec = spec.in_plain_int4  # see product_shapes
    stage, n_stages = profiling_stage(preset), len(threads) + 1 + (gpu is not None)
    remark = progress or (lambda *_: None)
    shapes, points, end_s = product_shapes(spec), attention_points(preset), clock() + preset.cpu_budget_s
    model = probed_model(spec, shapes, preset.cycle_bytes, max(tokens for _, tokens in points))
    cpu = []
    for n_done, n_threads in enumerate(sorted(threads)):
        remark(stage, n_done, n_stages)
        budget_s = (end_s - clock()) / (len(threads) - n_done)
        times = measured_cpu(model, points, n_threads, free_bytes, preset, budget_s, origin, clock)
        rows = cpu_rows(sparse, n_threads, preset, origin, clock) if sparse is not None else ()
        cpu.append(replace(times, rows=rows))
    remark(stage, len(threads), n_stages)
    disk = _disk_rate(subject.disk_file, origin, clock)
    metrics = GpuMetrics(warning=subject.gpu_problem)
    if gpu is not None:
        remark(stage, len(threads) + 1, n_stages)
        registry = subject.registry or Registry()
        metrics = measured_gpu(GpuProbe(gpu, registry, preset, origin, clock), spec, shapes, points, sparse)
    remark(stage, n_stages, n_stages)
    profile = HardwareProfile(
        version=PROFILE_VERSION,
        name=subject.machine.cpu_model,
        kind=MEASURED,
        machine=subject.machine,
        cpu=tuple(cpu),
        gpu=metrics.times,
        link=metrics.link,
        disk_read_bytes_per_s=disk,
        warnings=(metrics.warning,) if metrics.warning else (),
    )
    warnings = [f"{what}: something else was running; {remedy}" for what in disturbances(profile)]
    return replace(profile, warnings=(*warnings, *profile.warnings))


def _disk_rate(file: Path | None, origin: Origin, clock: Clock) -> Measurement:
    rates: list[float] = []
    with suppress(OSError):  # a file that can't be read says nothing about the disk
        rates = probe_disk_bytes_per_s(file, clock) if file is not None else []
    return measured(rates, "B/s", origin) if rates else derived(ASSUMED_DISK_BYTES_PER_S, "B/s", origin)
