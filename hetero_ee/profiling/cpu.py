"""Measures the CPU for one model: passes through as many of its layers as a limit of bytes allows, part by part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from hetero_ee.costs.kv_types import KV_TYPE, kv_bytes_per_token
from hetero_ee.costs.work import MAX_DECODE_TOKENS
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.pass_probe import SMALLEST_S, PassSamples, probe_pass, time_pass
from hetero_ee.profiling.preset import LEAST_TOKENS, PassSampling, Point, Preset, affordable_points
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import CODEBOOK, random_weights
from hetero_ee.weights.weight import TileWeight
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.read import Read
from hetero_ee_cpu_ops.thread_pool import ThreadPool
from hetero_ee_profiles.cpu_probe import READ_BYTES, probe_read_bytes_per_s
from hetero_ee_profiles.hardware import (
    AttentionTime,
    DeviceTimes,
    HardwareProfile,
    MatmulTime,
    OverheadTime,
    interpolated,
)
from hetero_ee_profiles.measurement import Measurement, Origin, measured
from hetero_ee_profiles.probe_samples import INT4_TILE_BYTES, TILE_COLUMNS, TILE_ROWS, Clock, ProductShape

CHECK_REPEATS = 5  # of reading memory, to compare with a kept profile
HEAD_SHARE = 4  # of the bytes that weights may take, the lm_head gets one in so many; a larger one is cut
MIN_HEAD_BYTES = 2**24  # that it always gets
N_CALLS = 20  # of the smallest product
CHUNK_BYTES = 2**27  # of weights that a chunk passes: more layers would not be slower ones


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """What passes are timed through instead of the model."""

    spec: ModelSpec  # of as many layers as there was room for
    weights: ModelWeights
    n_layers: int  # of the model
    n_chunk_layers: int  # that a prompt's chunks pass, of the spec's


def probed_model(spec: ModelSpec, shapes: Sequence[ProductShape], max_bytes: int, context_tokens: int) -> ProbedModel:
    """Random weights in the model's shapes: as many layers as max_bytes hold, weights and cache each; one at least.

    Embedding and lm_head share a matrix, of fewer tokens where theirs are many: its time is in proportion to them.
    """
    head = next(shape for shape in shapes if shape.layout == "int8")
    token_bytes = head.n_bytes // head.n_rows
    vocab_size = min(spec.vocab_size, max(MIN_HEAD_BYTES, max_bytes // HEAD_SHARE) // token_bytes)
    once_bytes = min(head.n_bytes, vocab_size * token_bytes)
    layer_bytes = sum(shape.n_bytes * shape.n_layers for shape in shapes if shape.layout == "int4") // spec.n_layers
    kv_bytes = kv_bytes_per_token(spec.n_kv_heads, spec.head_dim, KV_TYPE) * context_tokens
    n_layers = max(1, min(spec.n_layers, (max_bytes - once_bytes) // layer_bytes, max_bytes // kv_bytes))
    probed = replace(
        spec,
        n_layers=n_layers,
        vocab_size=vocab_size,
        sliding_windows=(None,) * n_layers,  # the planner counts what a window saves
        layer_ropes=None,
        tied_head=True,
        learned_position_offset=None,
    )
    n_chunk_layers = max(1, min(n_layers, (CHUNK_BYTES - once_bytes) // layer_bytes))
    return ProbedModel(probed, random_weights(probed), spec.n_layers, n_chunk_layers)


def measured_cpu(
    model: ProbedModel,
    points: Sequence[Point],
    n_threads: int,
    free_bytes: int,
    preset: Preset,
    budget_s: float,
    origin: Origin,
    clock: Clock,
) -> DeviceTimes:
    """points: of the passes, among them one at the shortest context of each m; where budget_s is short, see preset."""
    end_s = clock() + budget_s

    def timed(seconds: Sequence[float]) -> Measurement:
        return measured(seconds, "s", origin)

    spec = model.spec
    rates = _read_bytes_per_s(_buffers(model.weights), n_threads, max(5, preset.repeats), clock)
    calls_s, passes = _passes(model, points, n_threads, preset.pass_sample_s, end_s, clock)
    shortest = {m: passes[m, min(tokens for other, tokens in passes if other == m)] for m, _ in passes}
    heads = spec.n_heads, spec.n_kv_heads, spec.head_dim
    return DeviceTimes(
        threads=n_threads,
        free_bytes=free_bytes,
        read_bytes_per_s=measured(rates, "B/s", origin),
        call=timed(calls_s),
        matmuls=tuple(
            MatmulTime(*shape, m, model.weights.n_bytes, timed(seconds))
            for m, found in shortest.items()
            for shape, seconds in {**found.products, found.head: found.head_s}.items()
        ),
        attentions=tuple(
            AttentionTime(*heads, m, tokens, KV_TYPE, timed(context_s(found, shortest[m], model.n_layers)))
            for (m, tokens), found in passes.items()
        ),
        overheads=tuple(
            OverheadTime(spec.hidden_size, spec.ffn_size, m, timed(found.layer_s), timed(found.outside_s))
            for m, found in shortest.items()
        ),
    )


def context_s(found: PassSamples, shortest: PassSamples, n_layers: int) -> list[float]:
    """Seconds that the context costs a layer: attention, and what all else takes longer than at the shortest context.

    Keys and values push weights and code out of the caches. n_layers: that share what is outside of them.
    """
    slower_s = found.besides_attention_s - shortest.besides_attention_s
    slower_s += (found.besides_layers_s - shortest.besides_layers_s) / n_layers
    return [seconds + max(slower_s, 0.0) for seconds in found.attention_s]


def speed_since(profile: HardwareProfile, threads: int, clock: Clock) -> float:
    """How fast memory is read now over how fast it was for the profile: what was measured may be out of date."""
    times = profile.cpu_with(threads)
    return median(_read_bytes_per_s(_buffers(None), times.threads, CHECK_REPEATS, clock)) / times.read_bytes_per_s.value


def _buffers(weights: ModelWeights | None) -> list[Any]:
    """Something to read: the weights' tiles, where they are enough."""
    matrices = weights.matrices.values() if weights is not None else ()
    found = [weight.tiles.numpy() for weight in matrices if isinstance(weight, TileWeight)]
    if sum(tiles.nbytes for tiles in found) >= READ_BYTES:
        return found
    return [torch.ones(READ_BYTES // 8, dtype=torch.int64).numpy()]  # in pages as small as those of weights


def _read_bytes_per_s(buffers: Sequence[Any], n_threads: int, repeats: int, clock: Clock) -> list[float]:
    pool = ThreadPool(n_threads)
    try:
        return probe_read_bytes_per_s(pool, buffers, repeats, clock)
    finally:
        pool.close()


@contextmanager
def memory_reader(n_threads: int) -> Iterator[Callable[[], int]]:
    """Inside, what reads memory on so many threads, and says how many bytes."""
    pool = ThreadPool(n_threads)
    [buffer] = _buffers(None)

    def read() -> int:
        Read(pool)(buffer)
        return int(buffer.nbytes)

    try:
        yield read
    finally:
        pool.close()


def _calls_s(pool: ThreadPool, clock: Clock) -> list[float]:
    """Of a product of one tile."""
    multiply, x = Matmul(pool), np.ones((1, TILE_COLUMNS), np.float32)
    tiles, scales = np.zeros((1, 1, INT4_TILE_BYTES), np.uint8), np.ones((1, 1, TILE_ROWS), np.float16)
    tile, found = TileMatrix(tiles, scales, 0, CODEBOOK), []
    for _ in range(N_CALLS):
        start_s = clock()
        multiply(x, tile)
        found.append(max(clock() - start_s, SMALLEST_S))
    return found


def _passes(
    model: ProbedModel, points: Sequence[Point], n_threads: int, sample_s: float, end_s: float, clock: Clock
) -> tuple[list[float], Mapping[Point, PassSamples]]:
    """Seconds of the smallest product; passes of the points, in order, or of those that there is time for until end_s.
    Compiling kernels is not counted.
    """
    spec, found = model.spec, {}
    max_tokens = max(tokens for _, tokens in points)
    cache = CpuKvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, max_tokens, kind=KV_TYPE)
    executor = CpuExecutor(spec, model.weights, max_tokens, n_threads, cache=cache)
    try:
        begun_s = clock()
        executor.prepare()
        end_s += clock() - begun_s
        calls_s = _calls_s(executor.pool, clock)
        chunk_s = _chunk_seconds(executor, points, model.n_chunk_layers, clock)
        points, kept_s = affordable_points(points, chunk_s, end_s - clock())
        for n_done, (m, tokens) in enumerate(points):
            is_chunk = m > MAX_DECODE_TOKENS
            n_left = (
                len(points) - n_done if is_chunk else sum(other <= MAX_DECODE_TOKENS for other, _ in points[n_done:])
            )
            limit_s = (end_s - clock() - (0.0 if is_chunk else kept_s)) / n_left
            n_layers = model.n_chunk_layers if is_chunk else None
            found[m, tokens] = probe_pass(executor, m, tokens, PassSampling(sample_s, limit_s), clock, n_layers)
        return calls_s, found
    finally:
        executor.close()


def _chunk_seconds(
    executor: CpuExecutor, points: Sequence[Point], n_layers: int, clock: Clock
) -> Callable[[int, int], float]:
    """Seconds expected of chunks' passes at a point, from two passes of short chunks."""
    chunks = [point for point in points if point[0] > MAX_DECODE_TOKENS]
    if not chunks:
        return lambda m, context_tokens: 0.0
    n_tokens = min(LEAST_TOKENS, *(m for m, _ in chunks))
    contexts = {n_tokens, max(tokens for _, tokens in chunks)}
    known = [(tokens, time_pass(executor, n_tokens, tokens, clock, n_layers)) for tokens in contexts]
    return lambda m, context_tokens: interpolated(known, context_tokens) * m / n_tokens
