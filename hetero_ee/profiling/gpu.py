"""Measures the GPU and the link for one model. Failures lead to a warning, never to an error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hetero_ee.costs.product import stored_layout
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.devices import gpu_cache
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.arena import MAX_ROWS, Arena
from hetero_ee.ops.gpu_operations import GpuOperations, gpu_operations
from hetero_ee.ops.registry import Registry
from hetero_ee.profiling.cpu import memory_reader
from hetero_ee.profiling.preset import Point, Preset
from hetero_ee.profiling.problems import WITHOUT_GPU, reason
from hetero_ee.profiling.rows import gpu_rows
from hetero_ee.runtime.drafted import DraftNoise, noise_words
from hetero_ee.runtime.gpu.segment import GpuResources, GpuSegment
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.random_weights import CODEBOOK, RANDOM
from hetero_ee.weights.tiles import SCALES_A_TILE, TILE_BYTES
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.gpu.link_probe import probe_link
from hetero_ee_profiles.gpu.platform import GpuPlatform
from hetero_ee_profiles.gpu.probe import (
    FREE_SHARE,
    KV_KIND,
    ProductKernel,
    probe_free_bytes,
    probe_gpu_attention,
    probe_gpu_copy_bytes_per_s,
    probe_gpu_products,
)
from hetero_ee_profiles.hardware import AttentionTime, DeviceTimes, LinkTimes, MatmulTime, OverheadTime
from hetero_ee_profiles.host.process import physical_core_count
from hetero_ee_profiles.measurement import Measurement, Origin, measured
from hetero_ee_profiles.probe_samples import TILE_COLUMNS, TILE_ROWS, Clock, ProductShape

FEW_LAYERS, MANY_LAYERS = 1, 9
CALL_SHAPE = ProductShape("int4", TILE_ROWS, TILE_COLUMNS, 64)  # one tile, 64 times in a row in one graph
SMALL_VOCABULARY = 64  # the embedding has few rows, as long as the model's


@dataclass(frozen=True, slots=True)
class GpuMetrics:
    """Measured times of a GPU and of its link; either both or neither."""

    times: DeviceTimes | None = None
    link: LinkTimes | None = None
    warning: str = ""  # why there are no times; empty if that needs no warning


@dataclass(frozen=True, slots=True)
class GpuProbe:
    """The GPU to measure, and the amount of measuring."""

    platform: GpuPlatform
    registry: Registry
    preset: Preset
    origin: Origin
    clock: Clock

    def timed(self, seconds: Sequence[float]) -> Measurement:
        return measured(seconds, "s", self.origin)


def measured_gpu(
    probe: GpuProbe,
    spec: ModelSpec,
    shapes: Sequence[ProductShape],
    points: Sequence[Point],
    sparse: ModelSpec | None = None,
) -> GpuMetrics:
    """Measure the GPU and the link. If this fails, return a warning instead, since the CPU's times are still valid.

    Drivers, compilers and kernels raise errors of every kind, so all are caught.

    Args:
        shapes: shapes of the products to time.
        points: numbers of tokens and contexts to time attention at.
        sparse: the same model with sparse FFNs, if their rows are to be timed too.
    """
    platform, preset = probe.platform, probe.preset
    try:
        with platform.current():
            n_bytes = min(preset.link_bytes, platform.free_bytes() // FREE_SHARE)
            with memory_reader(physical_core_count()) as read:
                link = probe_link(platform, spec.hidden_size, n_bytes, read, preset.repeats, probe.origin, probe.clock)
            times = _gpu_times(probe, spec, shapes, points)
        if sparse is not None:
            times = replace(times, rows=gpu_rows(sparse, platform, probe.registry, preset, probe.origin))
        return GpuMetrics(times, link)
    except Exception as error:
        return GpuMetrics(warning=f"the GPU couldn't be measured ({reason(error)}); {WITHOUT_GPU}")


def _gpu_times(
    probe: GpuProbe, spec: ModelSpec, shapes: Sequence[ProductShape], points: Sequence[Point]
) -> DeviceTimes:
    platform, preset, registry = probe.platform, probe.preset, probe.registry
    timed, sampling = probe.timed, preset.gpu_sampling
    heads = spec.n_heads, spec.n_kv_heads, spec.head_dim
    operations = gpu_operations(registry, platform.kind)
    kernels = _product_kernels(platform, operations, registry)
    free_bytes = probe_free_bytes(platform)
    rates = probe_gpu_copy_bytes_per_s(platform, max(5, preset.repeats), preset.warm_up_s, probe.clock)
    products = probe_gpu_products(platform, shapes, preset.tokens, kernels, sampling, preset.cycle_bytes)
    calls = probe_gpu_products(platform, [CALL_SHAPE], (1,), kernels, sampling, preset.cycle_bytes)
    can_record = registry.choose("attention", platform.kind).is_capturable
    attentions = probe_gpu_attention(platform, heads, spec.n_layers, points, operations.attention, can_record, sampling)
    return DeviceTimes(
        threads=0,
        free_bytes=free_bytes,
        read_bytes_per_s=measured(rates, "B/s", probe.origin),
        call=timed(calls[0].seconds),
        matmuls=tuple(
            MatmulTime(p.shape.layout, p.shape.n_rows, p.shape.n_columns, p.m, p.cycle_bytes, timed(p.seconds))
            for p in products
        ),
        attentions=tuple(AttentionTime(*heads, a.m, a.context_tokens, KV_KIND, timed(a.seconds)) for a in attentions),
        overheads=tuple(_overheads(probe, spec, operations)),
    )


def _product_kernels(platform: GpuPlatform, operations: GpuOperations, registry: Registry) -> dict[str, ProductKernel]:
    """Return the kernels that GPU segments use for products, by weight layout."""

    def made(name: str, multiply: Any, prepare: Any, codebook: tuple[int, ...] | None) -> ProductKernel:
        def prepared(shape: ProductShape, tiles: Any, scales: Any) -> Any:
            return prepare(TileWeight(tiles, scales, 0, codebook, shape.n_rows, shape.n_columns), platform.device)

        return ProductKernel(multiply, prepared, registry.choose(name, platform.kind).is_capturable)

    return {
        "int4": made("matmul_int4", operations.matmul_int4, operations.prepare_int4, CODEBOOK),
        "int8": made("matmul_int8", operations.matmul_int8, operations.prepare_int8, None),
    }


def _overheads(probe: GpuProbe, spec: ModelSpec, operations: GpuOperations) -> list[OverheadTime]:
    """Time what a segment does apart from products and attention, per layer and per pass.

    A layer's time is derived from segments of two depths. A pass includes what surrounds a segment: copying slots and
    positions to the GPU, the final norm, and returning the chosen token to the CPU. Hidden states are made on the GPU,
    since the link's transfer time covers moving them.
    """
    platform, preset, clock = probe.platform, probe.preset, probe.clock
    points = [(m, max(m, MAX_ROWS)) for m in preset.tokens]
    max_tokens = max(context for _, context in points)
    bare = replace(
        operations,
        matmul_int4=_nothing,
        matmul_int8=_nothing,
        attention=_nothing,
        prepare_int4=_nothing,
        prepare_int8=_nothing,
    )
    segments = [_segment(_shallow(spec, depth), platform, bare, max_tokens) for depth in (FEW_LAYERS, MANY_LAYERS)]
    finish = _finish(spec, platform, bare)
    found = []
    for m, context in points:
        runs = [_prepared(segment, m, context, finish) for segment in segments]
        layers, passes = [], []
        for _ in range(3 * preset.repeats):
            few_s, many_s = (_run_s(run, clock) for run in runs)
            layer_s = max((many_s - few_s) / (MANY_LAYERS - FEW_LAYERS), 1e-9)
            layers.append(layer_s)
            passes.append(max(few_s - FEW_LAYERS * layer_s, 1e-9))
        times = probe.timed(layers), probe.timed(passes)
        found.append(OverheadTime(spec.hidden_size, spec.ffn_size, m, *times))
    return found


def _run_s(run: Callable[[], Any], clock: Clock) -> float:
    start_s = clock()
    run()
    return clock() - start_s


def _shallow(spec: ModelSpec, n_layers: int) -> ModelSpec:
    """Return the model with n_layers layers and a small vocabulary, which changes the time of products only."""
    return replace(spec.plain_layers(n_layers), vocab_size=SMALL_VOCABULARY, learned_position_offset=None)


def _segment(spec: ModelSpec, platform: GpuPlatform, operations: GpuOperations, max_tokens: int) -> GpuSegment:
    cache = gpu_cache(spec, max_tokens, KV_KIND, platform.device, n_slots=1)
    recorder = platform.recorded if operations.is_capturable else None
    blocks = [block for block in decoder_blocks(spec) if block.layer is not None]
    arena = Arena(spec, cache, max_tokens)
    return GpuSegment(spec, _dummy_weights(spec), blocks, GpuResources(cache, operations, recorder, arena))


def _prepared(segment: GpuSegment, m: int, context_tokens: int, finish: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """Return a warmed-up function that runs one pass of m tokens, ending at position context_tokens of the cache."""
    cache, before = segment.cache, context_tokens - m
    cache.close(0)
    cache.open(0)
    if before:
        cache.admit(Batch.of_sequence(0, 0, [0] * before))
    batch = Batch.of_sequence(0, before, [0] * m)
    hidden = torch.ones(m, segment.spec.hidden_size, device=cache.device)

    def run() -> None:
        cache.admit(batch)
        finish(segment.run(hidden, batch))
        cache.truncate(0, before)

    run()
    run()  # the first run compiles and records
    return run


def _finish(spec: ModelSpec, platform: GpuPlatform, operations: GpuOperations) -> Callable[[Tensor], Any]:
    """Return a function that does what follows the last layer, without the head's product."""
    device = platform.device
    scale, bias = torch.ones(spec.hidden_size, device=device), torch.zeros(spec.hidden_size, device=device)
    last, logits = torch.ones(1, spec.hidden_size, device=device), torch.zeros(1, spec.vocab_size, device=device)
    greedy = noise_words([DraftNoise(0.0, 0, 0, 0)]).to(device)

    def finish(hidden: Tensor) -> int:
        last.copy_(hidden[-1:])
        if spec.norm == "layer":
            operations.layer_norm(last, scale, bias, spec.norm_eps)
        else:
            operations.rms_norm(last, scale, spec.norm_eps)
        return int(operations.draft(logits, greedy)[0, 0])

    return finish


def _nothing(*arguments: Any, **options: Any) -> None:
    """Stand in for a product or attention and leave the output unchanged."""


def _dummy_weights(spec: ModelSpec) -> ModelWeights:
    """Return weights whose matrices are empty, since no product reads them. Norms are 1, biases 0."""
    weights = ModelWeights({}, {}, RANDOM)
    for tensor in all_tensors(decoder_blocks(spec)):
        if is_quantized(tensor.role):
            name = stored_layout(tensor)
            tiles, scales = torch.empty(0, TILE_BYTES[name]), torch.empty(0, SCALES_A_TILE[name])
            codebook = CODEBOOK if name == "int4" else None
            weights.matrices[tensor.name] = TileWeight(tiles, scales, 0, codebook, *tensor.shape)
        else:
            weights.vectors[tensor.name] = torch.full(tensor.shape, 0.0 if tensor.name.endswith("bias") else 1.0)
    return weights
