"""Measures the GPU and the link for one model; what goes wrong there becomes a warning, never an error."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.gpu_overhead import probe_gpu_overheads
from hetero_ee.profiling.preset import Preset
from hetero_ee.runtime.gpu.buffers import MAX_ROWS
from hetero_ee.runtime.gpu.operations import GpuOperations, gpu_operations
from hetero_ee.runtime.gpu.registry import Registry
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.gpu.link_probe import SHORT_REPEATS, probe_link
from hetero_ee_profiles.gpu.platform import GpuPlatform
from hetero_ee_profiles.gpu.probe import (
    FREE_SHARE,
    KV_KIND,
    ProductKernel,
    probe_free_bytes,
    probe_gpu_attention,
    probe_gpu_copy_bytes_per_s,
    probe_gpu_products,
    probe_launch_s,
    probe_synchronize_s,
)
from hetero_ee_profiles.hardware import AttentionTime, DeviceTimes, HardwareProfile, LinkTimes, MatmulTime, OverheadTime
from hetero_ee_profiles.measurement import Measurement, Origin, measured
from hetero_ee_profiles.probe_samples import CODEBOOK, Clock, ProductShape

MAX_REASON = 200  # characters of what a driver says
WAY_OUT = "plans use the CPU alone; `hetero-ee doctor` says more, `hetero-ee profile --refresh` measures again"


@dataclass(frozen=True, slots=True)
class GpuMetrics:
    """times and link: both or none. warning: why there are none, empty where there is nothing to say."""

    times: DeviceTimes | None = None
    link: LinkTimes | None = None
    warning: str = ""


def measured_gpu(
    spec: ModelSpec,
    shapes: Sequence[ProductShape],
    points: Sequence[tuple[int, int]],
    platform: GpuPlatform,
    registry: Registry,
    preset: Preset,
    origin: Origin,
    clock: Clock,
) -> GpuMetrics:
    """shapes, points: products and (rows, context) of attention to time. A GPU that fails at any of it gives a warning.

    Whatever fails: drivers, compilers and kernels raise what they like, and the CPU's figures hold without the GPU's.
    """
    try:
        with platform.current():
            link = _link_times(spec, platform, preset, origin, clock)
            times = _gpu_times(spec, shapes, points, platform, registry, preset, origin, clock)
        return GpuMetrics(times, link)
    except Exception as error:
        return GpuMetrics(warning=f"the GPU couldn't be measured ({reason(error)}); {WAY_OUT}")


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


def _gpu_times(
    spec: ModelSpec,
    shapes: Sequence[ProductShape],
    points: Sequence[tuple[int, int]],
    platform: GpuPlatform,
    registry: Registry,
    preset: Preset,
    origin: Origin,
    clock: Clock,
) -> DeviceTimes:
    def timed(seconds: Sequence[float]) -> Measurement:
        return measured(seconds, "s", origin)

    sampling, repeats = preset.gpu_sampling, preset.repeats
    heads = spec.n_heads, spec.n_kv_heads, spec.head_dim
    operations = gpu_operations(registry, platform.kind)
    kernels = _product_kernels(platform, operations, registry)
    free_bytes = probe_free_bytes(platform)
    rates = probe_gpu_copy_bytes_per_s(platform, max(5, repeats), preset.warm_up_s, clock)
    products = probe_gpu_products(platform, shapes, preset.rows, MAX_ROWS, kernels, sampling, preset.cycle_bytes)
    can_record = registry.choose("attention", platform.kind).is_capturable
    attentions = probe_gpu_attention(
        platform, heads, spec.n_layers, points, MAX_ROWS, operations.attention, can_record, sampling
    )
    argmax = registry.choose("argmax", platform.kind).load()
    overhead_points = [(m, max(m, MAX_ROWS)) for m in preset.rows]
    overheads = probe_gpu_overheads(spec, platform, operations, argmax, overhead_points, 3 * repeats, clock)
    return DeviceTimes(
        threads=0,
        free_bytes=free_bytes,
        read_bytes_per_s=measured(rates, "B/s", origin),
        matmuls=tuple(
            MatmulTime(p.shape.layout, p.shape.n_rows, p.shape.n_columns, p.m, p.cycle_bytes, timed(p.seconds))
            for p in products
        ),
        attentions=tuple(AttentionTime(*heads, a.m, a.context_tokens, KV_KIND, timed(a.seconds)) for a in attentions),
        overheads=tuple(
            OverheadTime(spec.hidden_size, spec.ffn_size, o.m, timed(o.layer_s), timed(o.whole_pass_s))
            for o in overheads
        ),
    )


def _link_times(spec: ModelSpec, platform: GpuPlatform, preset: Preset, origin: Origin, clock: Clock) -> LinkTimes:
    repeats, n_short = preset.repeats, SHORT_REPEATS * preset.repeats
    n_bytes = min(preset.link_bytes, platform.free_bytes() // FREE_SHARE)
    found = probe_link(platform, spec.hidden_size, n_bytes, repeats, clock)
    return LinkTimes(
        to_gpu_bytes_per_s=measured(found.to_gpu, "B/s", origin),
        to_cpu_bytes_per_s=measured(found.to_cpu, "B/s", origin),
        pageable_to_gpu_bytes_per_s=measured(found.pageable_to_gpu, "B/s", origin),
        pageable_to_cpu_bytes_per_s=measured(found.pageable_to_cpu, "B/s", origin),
        both_ways_bytes_per_s=measured(found.both_ways, "B/s", origin),
        latency=measured(found.latency_s, "s", origin),
        launch=measured(probe_launch_s(platform, n_short, clock), "s", origin),
        synchronize=measured(probe_synchronize_s(platform, n_short, clock), "s", origin),
        transfer=measured(found.transfer_s, "s", origin),
    )


def _product_kernels(platform: GpuPlatform, operations: GpuOperations, registry: Registry) -> dict[str, ProductKernel]:
    """By layout, those that a segment multiplies with."""

    def made(name: str, multiply: Any, prepare: Any, codebook: tuple[int, ...] | None) -> ProductKernel:
        def prepared(shape: ProductShape, tiles: Any, scales: Any) -> Any:
            return prepare(TileWeight(tiles, scales, 0, codebook, shape.n_rows, shape.n_columns), platform.device)

        return ProductKernel(multiply, prepared, registry.choose(name, platform.kind).is_capturable)

    return {
        "int4": made("matmul_int4", operations.matmul_int4, operations.prepare_int4, CODEBOOK),
        "int8": made("matmul_int8", operations.matmul_int8, operations.prepare_int8, None),
    }
