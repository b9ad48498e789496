"""Times the CPU's operations at a model's shapes: reading memory, int4 and int8 products, attention.

Weights are as many as the model really has, up to a limit beyond any cache: a small model sits in the cache, and its
times are others. Products take turns in the order a pass takes them, so that each finds the caches as there. Attention
takes turns over the layers' keys and values, with no weights read in between: short contexts may sit in the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetero_ee_cpu_ops.attention import Attention
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.places import SequenceCache, place_rows
from hetero_ee_cpu_ops.read import Read
from hetero_ee_cpu_ops.team import Team
from hetero_ee_profiles.probe_samples import (
    CODEBOOK,
    TILE_ROWS,
    AttentionSamples,
    Clock,
    ProductSamples,
    ProductShape,
)

READ_BYTES = 2**28
CACHE_BYTES = 2**28  # of keys and values that attention takes turns over, at most: more than any processor's cache


def probe_read_bytes_per_s(team: Team, repeats: int, clock: Clock) -> list[float]:
    """Memory read bandwidth on the team's threads."""
    read, buffer = Read(team), np.ones(READ_BYTES // 8, np.int64)
    read(buffer)
    return [buffer.nbytes / _timed(lambda: read(buffer), clock) for _ in range(repeats)]


def probe_products(
    team: Team, shapes: Sequence[ProductShape], rows: Sequence[int], repeats: int, max_cycle_bytes: int, clock: Clock
) -> list[ProductSamples]:
    """Samples of every shape at every number of rows; weights cycle through max_cycle_bytes at most."""
    matmul, random = Matmul(team), np.random.default_rng(0)
    layers = _layers(shapes, max_cycle_bytes, random)
    cycle_bytes = sum(shape.n_bytes for layer in layers for shape, _ in layer)
    seconds: dict[tuple[ProductShape, int], list[float]] = {(shape, m): [] for shape in shapes for m in rows}
    for m in rows:
        inputs = {k: random.standard_normal((m, k), np.float32) for k in {shape.n_columns for shape in shapes}}
        for repeat in range(repeats + 1):
            for layer in layers:
                for shape, matrix in layer:
                    x = inputs[shape.n_columns]
                    start_s = clock()
                    matmul(x, matrix)
                    if repeat:  # the first round compiles and warms
                        seconds[shape, m].append(clock() - start_s)
    return [ProductSamples(shape, m, cycle_bytes, tuple(found)) for (shape, m), found in seconds.items()]


def probe_attention(
    team: Team,
    heads: tuple[int, int, int],
    n_layers: int,
    points: Sequence[tuple[int, int]],
    repeats: int,
    clock: Clock,
) -> list[AttentionSamples]:
    """heads: (n_heads, n_kv_heads, head_dim). Samples for each (m, context_tokens), over an fp32 cache."""
    n_heads, n_kv_heads, head_dim = heads
    capacity = max(context for _, context in points)
    layer_bytes = 2 * n_kv_heads * capacity * head_dim * 4
    n_layers = max(1, min(n_layers, CACHE_BYTES // layer_bytes))
    shape = (n_layers, n_kv_heads, head_dim)
    room = np.full((2, n_layers, n_kv_heads, capacity, head_dim), 0.01, np.float32)
    cache, attention = SequenceCache(room[0], room[1]), Attention(n_layers, *heads, "fp32", team)
    samples = []
    for m, context in points:
        queries = np.full((m, n_heads * head_dim), 0.01, np.float32)
        places = place_rows([cache] * m, range(context - m, context), shape, "fp32")
        out = np.empty_like(queries)
        found = []
        for repeat in range(repeats + 1):
            for layer in range(n_layers):
                start_s = clock()
                attention.attend(queries, places, layer, None, out)
                if repeat:
                    found.append(clock() - start_s)
        samples.append(AttentionSamples(m, context, tuple(found)))
    return samples


def _layers(
    shapes: Sequence[ProductShape], max_cycle_bytes: int, random: Any
) -> list[list[tuple[ProductShape, TileMatrix]]]:
    """Matrices of as many passes' layers as max_cycle_bytes hold; what a pass has once comes in the last one."""
    n_layers = max(shape.n_layers for shape in shapes)
    once_bytes = sum(shape.n_bytes for shape in shapes if shape.n_layers == 1)
    layer_bytes = sum(shape.n_bytes for shape in shapes if shape.n_layers > 1) or 1
    n_kept = max(1, min(n_layers, (max_cycle_bytes - once_bytes) // layer_bytes))
    return [
        [(shape, _matrix(shape, random)) for shape in shapes if shape.n_layers > 1 or index == n_kept - 1]
        for index in range(n_kept)
    ]


def _matrix(shape: ProductShape, random: Any) -> TileMatrix:
    is_int4 = shape.layout == "int4"
    tiles = random.integers(0, 256, (*shape.grid, shape.tile_bytes), np.uint8)
    scales = np.full((*shape.grid, TILE_ROWS), 0.01, np.float16)
    return TileMatrix(tiles if is_int4 else tiles.view(np.int8), scales, 0, CODEBOOK if is_int4 else None)


def _timed(action: Callable[[], Any], clock: Clock) -> float:
    start_s = clock()
    action()
    return clock() - start_s
