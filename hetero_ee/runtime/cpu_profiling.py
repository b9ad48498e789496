"""Measures the CPU for one model: passes through as many of its layers as a limit of bytes allows, part by part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from hetero_ee.models.spec import ModelSpec
from hetero_ee.planning.parts import kv_bytes_per_token
from hetero_ee.runtime.cpu_executor import CpuExecutor
from hetero_ee.runtime.kv_cache import KvCache
from hetero_ee.runtime.pass_probe import PassSamples, probe_pass
from hetero_ee.runtime.thoroughness import Thoroughness
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import random_weights
from hetero_ee_cpu_ops.team import Team
from hetero_ee_profiles.cpu_probe import probe_read_bytes_per_s
from hetero_ee_profiles.hardware import AttentionTime, DeviceTimes, HardwareProfile, MatmulTime, OverheadTime
from hetero_ee_profiles.measurement import Measurement, Origin, measured
from hetero_ee_profiles.probe_samples import Clock, ProductShape

CHECK_REPEATS = 5  # of reading memory, to compare with a kept profile
KV_TYPE = "fp32"  # of the cache that passes are timed with
Point = tuple[int, int]  # rows, context


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """What passes are timed through in the place of a model of n_layers: as many of them as there was room for."""

    spec: ModelSpec
    weights: ModelWeights
    n_layers: int


def probed_model(spec: ModelSpec, shapes: Sequence[ProductShape], max_bytes: int, context_tokens: int) -> ProbedModel:
    """Random weights in the model's shapes; layers as many as max_bytes hold of their weights, and of their keys and
    values; one at least. Embedding and head share a matrix."""
    once_bytes = sum(shape.n_bytes for shape in shapes if shape.layout == "int8")
    layer_bytes = sum(shape.n_bytes * shape.n_layers for shape in shapes if shape.layout == "int4") // spec.n_layers
    kv_bytes = kv_bytes_per_token(spec, KV_TYPE) * context_tokens
    n_layers = max(1, min(spec.n_layers, (max_bytes - once_bytes) // layer_bytes, max_bytes // kv_bytes))
    probed = replace(
        spec,
        n_layers=n_layers,
        sliding_windows=(None,) * n_layers,  # the planner counts what a window saves
        tied_head=True,
        learned_position_offset=None,
    )
    return ProbedModel(probed, random_weights(probed), spec.n_layers)


def measured_cpu(
    model: ProbedModel,
    points: Sequence[Point],
    n_threads: int,
    free_bytes: int,
    thoroughness: Thoroughness,
    origin: Origin,
    clock: Clock,
) -> DeviceTimes:
    """points: rows and contexts of the passes, some at the shortest context of each number of rows."""

    def timed(seconds: Sequence[float]) -> Measurement:
        return measured(seconds, "s", origin)

    spec = model.spec
    rates = _read_bytes_per_s(n_threads, max(5, thoroughness.repeats), clock)
    passes = _passes(model, points, n_threads, thoroughness.pass_sample_s, clock)
    shortest = {m: passes[m, min(tokens for rows, tokens in points if rows == m)] for m, _ in points}
    heads = spec.n_heads, spec.n_kv_heads, spec.head_dim
    return DeviceTimes(
        threads=n_threads,
        free_bytes=free_bytes,
        read_bytes_per_s=measured(rates, "B/s", origin),
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
    """Seconds that the context costs a layer: attention, and what all else takes longer than behind the shortest one,
    since keys and values push weights and code out of the caches. n_layers: that share what is outside of them.
    """
    slower_s = found.besides_attention_s - shortest.besides_attention_s
    slower_s += (found.besides_layers_s - shortest.besides_layers_s) / n_layers
    return [seconds + max(slower_s, 0.0) for seconds in found.attention_s]


def speed_since(profile: HardwareProfile, threads: int, clock: Clock) -> float:
    """How fast memory is read now over how fast it was for the profile: kept figures may be out of date."""
    times = profile.cpu_with(threads)
    return median(_read_bytes_per_s(times.threads, CHECK_REPEATS, clock)) / times.read_bytes_per_s.value


def _read_bytes_per_s(n_threads: int, repeats: int, clock: Clock) -> list[float]:
    team = Team(n_threads)
    try:
        return probe_read_bytes_per_s(team, repeats, clock)
    finally:
        team.close()


def _passes(
    model: ProbedModel, points: Sequence[Point], n_threads: int, sample_s: float, clock: Clock
) -> Mapping[Point, PassSamples]:
    spec = model.spec
    max_tokens = max(tokens for _, tokens in points)
    cache = KvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, max_tokens, kind=KV_TYPE)
    executor = CpuExecutor(spec, model.weights, max_tokens, n_threads, cache=cache)
    try:
        executor.prepare()
        return {(m, tokens): probe_pass(executor, m, tokens, sample_s, clock) for m, tokens in points}
    finally:
        executor.close()
