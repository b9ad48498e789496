"""Measures this machine for one model: a HardwareProfile of which everything was timed here, now."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hetero_ee.config import Progress
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.cpu import measured_cpu, probed_model
from hetero_ee.profiling.gpu import GpuMetrics, measured_gpu
from hetero_ee.profiling.preset import Preset, attention_points, product_shapes
from hetero_ee.runtime.gpu.registry import Registry
from hetero_ee_profiles.disk_probe import probe_disk_bytes_per_s
from hetero_ee_profiles.gpu.platform import GpuPlatform
from hetero_ee_profiles.hardware import (
    MEASURED,
    PROFILE_VERSION,
    DeviceTimes,
    HardwareProfile,
    Machine,
)
from hetero_ee_profiles.measurement import Measurement, Origin, derived, measured

PROFILING = "Measuring this machine for a few seconds, to plan for it and say what to expect"
BUSY_SPREAD = 0.25  # a wider p20 to p80 of the read bandwidth means that something else is running
ASSUMED_DISK_BYTES_PER_S = 1e9  # where there is no file to read


def measure_profile(
    spec: ModelSpec,
    machine: Machine,
    origin: Origin,
    *,
    threads: Sequence[int],
    free_bytes: int,
    preset: Preset,
    disk_file: Path | None,
    clock: Callable[[], float],
    gpu: GpuPlatform | None = None,
    gpu_problem: str = "",
    registry: Registry | None = None,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Times the CPU at the model's shapes for each thread count, reading disk_file, and the GPU and the link.

    gpu: None leaves it out; gpu_problem: why, where there is one. registry: of what comes with the engine where None.
    Raises OSError; a GPU that fails is left out, with a warning in the profile.
    """
    n_stages = len(threads) + 1 + (gpu is not None)
    remark = progress or (lambda *_: None)
    shapes, points, end_s = product_shapes(spec), attention_points(preset), clock() + preset.cpu_budget_s
    model = probed_model(spec, shapes, preset.cycle_bytes, max(tokens for _, tokens in points))
    cpu = []
    for n_done, n_threads in enumerate(sorted(threads)):
        remark(PROFILING, n_done, n_stages)
        budget_s = (end_s - clock()) / (len(threads) - n_done)
        cpu.append(measured_cpu(model, points, n_threads, free_bytes, preset, budget_s, origin, clock))
    remark(PROFILING, len(threads), n_stages)
    disk = _disk_rate(disk_file, origin, clock)
    metrics = GpuMetrics(warning=gpu_problem)
    if gpu is not None:
        remark(PROFILING, len(threads) + 1, n_stages)
        chosen = registry or Registry()
        metrics = measured_gpu(spec, shapes, points, gpu, chosen, preset, origin, clock)
    remark(PROFILING, n_stages, n_stages)
    return HardwareProfile(
        version=PROFILE_VERSION,
        name=machine.cpu_model,
        kind=MEASURED,
        machine=machine,
        cpu=tuple(cpu),
        gpu=metrics.times,
        link=metrics.link,
        disk_read_bytes_per_s=disk,
        warnings=(*_warnings(cpu, metrics.times), *([metrics.warning] if metrics.warning else [])),
    )


def _disk_rate(file: Path | None, origin: Origin, clock: Callable[[], float]) -> Measurement:
    rates = probe_disk_bytes_per_s(file, clock) if file is not None else []
    return measured(rates, "B/s", origin) if rates else derived(ASSUMED_DISK_BYTES_PER_S, "B/s", origin)


def _warnings(cpu: Sequence[DeviceTimes], gpu: DeviceTimes | None) -> list[str]:
    devices = [
        (f"with {times.threads} {'thread' if times.threads == 1 else 'threads'} memory was read", times)
        for times in cpu
    ]
    devices += [("the GPU's memory was copied", gpu)] if gpu is not None else []
    return [
        f"{what} at {times.read_bytes_per_s.p20 / 1e9:.1f} to {times.read_bytes_per_s.p80 / 1e9:.1f} GB/s: something "
        "else was running, measure again on a quiet machine"
        for what, times in devices
        if times.read_bytes_per_s.spread > BUSY_SPREAD
    ]
