"""Measures the CPU for one model, by timing passes through as many of its layers as fit a byte limit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from hetero_ee.costs.kv_types import KV_TYPE
from hetero_ee.kv.devices import host_cache
from hetero_ee.layers.state import MAX_DECODE_TOKENS
from hetero_ee.models.blocks import layer_states
from hetero_ee.models.spec import ModelSpec
from hetero_ee.profiling.pass_probe import SMALLEST_S, PassSamples, probe_pass, time_pass
from hetero_ee.profiling.preset import LEAST_TOKENS, PassSampling, Point, Preset, affordable_points
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import CODEBOOK, random_weights
from hetero_ee.weights.weight import TileWeight
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.read import Read
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
HEAD_SHARE = 4  # the lm_head gets one in HEAD_SHARE of the bytes for weights; a larger one is cut
MIN_HEAD_BYTES = 2**24  # minimum for the lm_head
N_CALLS = 20  # of the smallest product
CHUNK_BYTES = 2**27  # of weights for a chunk: more layers would not run slower per layer


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A smaller model of the same shapes, through which passes are timed."""

    spec: ModelSpec  # with as many layers as fit
    weights: ModelWeights
    n_layers: int  # of the model
    n_chunk_layers: int  # of the spec, that a prompt's chunks run through


def probed_model(spec: ModelSpec, shapes: Sequence[ProductShape], max_bytes: int, context_tokens: int) -> ProbedModel:
    """Make random weights in the model's shapes, for as many layers as fit into max_bytes, at least one.

    Weights and KV cache get max_bytes each. Embedding and lm_head share a matrix, with fewer rows than a large
    vocabulary has, since its time is proportional to them.
    """
    head = next(shape for shape in shapes if shape.layout == "int8")
    token_bytes = head.n_bytes // head.n_rows
    vocab_size = min(spec.vocab_size, max(MIN_HEAD_BYTES, max_bytes // HEAD_SHARE) // token_bytes)
    once_bytes = min(head.n_bytes, vocab_size * token_bytes)
    layer_bytes = sum(shape.n_bytes * shape.n_layers for shape in shapes if shape.layout == "int4") // spec.n_layers
    kv_bytes = max(1, *(each.n_bytes(context_tokens, KV_TYPE) for each in layer_states(spec) if each is not None))
    n_layers = max(1, min(spec.n_layers, (max_bytes - once_bytes) // layer_bytes, max_bytes // kv_bytes))
    probed = replace(spec.plain_layers(n_layers), vocab_size=vocab_size, tied_head=True, learned_position_offset=None)
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
    """Measure the CPU with n_threads threads, by passes through the probed model.

    Args:
        points: sizes of the passes. Each number of tokens occurs at least once, at its shortest context.
        budget_s: seconds for all passes. preset.py states which passes are dropped if they don't suffice.
    """
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
    """Return the seconds per layer that a longer context costs: attention, and the slowdown of everything else.

    The rest becomes slower because keys and values displace weights and code from the caches.

    Args:
        shortest: samples at the shortest context, to compare with.
        n_layers: layers of the model, which share the costs outside of layers.
    """
    slower_s = found.besides_attention_s - shortest.besides_attention_s
    slower_s += (found.besides_layers_s - shortest.besides_layers_s) / n_layers
    return [seconds + max(slower_s, 0.0) for seconds in found.attention_s]


def speed_since(profile: HardwareProfile, threads: int, clock: Clock) -> float:
    """Measure the current memory read rate and return its ratio to the profile's."""
    times = profile.cpu_with(threads)
    return median(_read_bytes_per_s(_buffers(None), times.threads, CHECK_REPEATS, clock)) / times.read_bytes_per_s.value


def _buffers(weights: ModelWeights | None) -> list[Any]:
    """Return arrays of at least READ_BYTES to read: the weights' tiles if they are large enough, else new ones."""
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
    """Yield a function that reads memory with n_threads threads and returns the number of bytes."""
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
    """Return the seconds of N_CALLS products of one tile."""
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
    """Return the seconds of the smallest product, and samples of passes at as many points as fit until end_s.

    The time of compiling kernels is not counted.
    """
    spec, found = model.spec, {}
    max_tokens = max(tokens for _, tokens in points)
    cache = host_cache(spec, max_tokens, KV_TYPE)
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
    """Return a function of (m, context_tokens) that predicts a chunk's seconds, based on passes of short chunks."""
    chunks = [point for point in points if point[0] > MAX_DECODE_TOKENS]
    if not chunks:
        return lambda m, context_tokens: 0.0
    n_tokens = min(LEAST_TOKENS, *(m for m, _ in chunks))
    contexts = {n_tokens, max(tokens for _, tokens in chunks)}
    known = [(tokens, time_pass(executor, n_tokens, tokens, clock, n_layers)) for tokens in contexts]
    return lambda m, context_tokens: interpolated(known, context_tokens) * m / n_tokens
