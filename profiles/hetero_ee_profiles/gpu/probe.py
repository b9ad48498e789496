"""Measures a GPU's operations at a model's shapes: copies in its memory, int4 and int8 products, attention.

Products alternate between weights of as many bytes as the model has, if they fit, so that the L2 cache holds them only
if it would hold a small model's. Launches over one cycle of the weights are recorded in a graph, as in decoding, and
timed by the GPU's clock, so that the CPU's launch times are not counted. All rows are one product, as in a segment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetero_ee_kernels.pages import PAGE_TOKENS, attention_workspace, new_pages
from hetero_ee_profiles.gpu.platform import GpuPlatform, Work
from hetero_ee_profiles.probe_samples import (
    MAX_CACHE_LAYERS,
    TILE_ROWS,
    AttentionSamples,
    Clock,
    ProductSamples,
    ProductShape,
)

COPY_BYTES = 2**28
L2_TURNS = 4  # a cycle of this many times the L2 cache finds nothing in it
FREE_SHARE = 4  # one probe uses at most a fourth of the free memory
MAX_MATRICES = 512  # per cycle, two launches each
MAX_WARM_UP_RUNS = 1000
KV_KIND, KV_VALUE_BYTES = "fp16", 2
PIECE_BYTES = 2**25  # the smallest piece that probe_free_bytes allocates


@dataclass(frozen=True, slots=True)
class Sampling:
    """Limits for repeating each measurement."""

    repeats: int
    max_s: float  # limit for all repeats together; fewer are made if they would exceed it


@dataclass(frozen=True, slots=True)
class ProductKernel:
    multiply: Callable[..., Any]  # (x, matrix, out), x fp32
    prepared: Callable[[ProductShape, Any, Any], Any]  # (shape, tiles, scales) on the GPU (docs/FORMAT.md) -> matrix
    is_capturable: bool  # its launches may be recorded in a graph


def probe_free_bytes(platform: GpuPlatform) -> int:
    """Return the bytes that can really be allocated, to within 32 MiB, by allocating smaller and smaller pieces."""
    limit_bytes, n_bytes, held = platform.free_bytes(), 0, []
    piece_bytes = 1 << limit_bytes.bit_length()
    while piece_bytes >= PIECE_BYTES:
        try:
            if n_bytes + piece_bytes <= limit_bytes:
                held.append(platform.allocate((piece_bytes,), torch.uint8))
                n_bytes += piece_bytes
                continue
        except torch.OutOfMemoryError:
            pass
        piece_bytes //= 2
    return n_bytes


def probe_gpu_copy_bytes_per_s(platform: GpuPlatform, repeats: int, warm_up_s: float, clock: Clock) -> list[float]:
    """Measure the GPU's memory bandwidth: bytes read and written by a copy within its memory.

    Copies run for `warm_up_s` first, so that an idle GPU reaches its boost clock.
    """
    n_bytes = min(max(COPY_BYTES, L2_TURNS * platform.l2_bytes), platform.free_bytes() // FREE_SHARE)
    target, source = (platform.allocate((n_bytes,), torch.uint8) for _ in range(2))
    copy = partial(platform.copy, target, source)
    begun_s = clock()
    for _ in range(MAX_WARM_UP_RUNS):
        if clock() - begun_s >= warm_up_s:
            break
        copy()
        platform.synchronize()
    return [2 * n_bytes / seconds for seconds in platform.seconds(copy, repeats)]


def probe_gpu_products(
    platform: GpuPlatform,
    shapes: Sequence[ProductShape],
    rows: Sequence[int],
    kernels: Mapping[str, ProductKernel],
    sampling: Sampling,
    max_cycle_bytes: int,
) -> list[ProductSamples]:
    """Measure products of every shape with every number of rows.

    `kernels` are by layout. A product alternates between at most max_cycle_bytes of weights, or four L2 caches if
    larger.
    """
    model_bytes = sum(shape.n_bytes * shape.n_layers for shape in shapes)
    cycle_bytes = min(model_bytes, max(max_cycle_bytes, L2_TURNS * platform.l2_bytes))
    return [
        samples
        for shape in shapes
        for samples in _shape_samples(platform, shape, rows, kernels[shape.layout], sampling, cycle_bytes)
    ]


def probe_gpu_attention(
    platform: GpuPlatform,
    heads: tuple[int, int, int],
    n_layers: int,
    points: Sequence[tuple[int, int]],
    attend: Callable[..., Any],
    is_capturable: bool,
    sampling: Sampling,
) -> list[AttentionSamples]:
    """Measure one layer's attention at each point (m, context_tokens), for one sequence with an fp16 cache.

    Args:
        heads: (n_heads, n_kv_heads, head_dim).
        attend: an operation with the arguments of hetero_ee_kernels.attention.attention.
    """
    n_heads, n_kv_heads, head_dim = heads
    n_pages = -(-max(context for _, context in points) // PAGE_TOKENS)
    layer_bytes = n_pages * 2 * n_kv_heads * PAGE_TOKENS * head_dim * KV_VALUE_BYTES
    n_layers = max(1, min(n_layers, MAX_CACHE_LAYERS, platform.free_bytes() // FREE_SHARE // layer_bytes))
    pages = new_pages((n_layers, n_kv_heads, head_dim), KV_KIND, n_pages, (1, n_pages), platform.device)
    pages.table[0] = torch.arange(n_pages, dtype=torch.int32)
    workspace = attention_workspace(pages, max(m for m, _ in points), n_heads)
    found = []
    for m, context in points:
        queries, out = (platform.allocate((m, n_heads * head_dim), torch.float32) for _ in range(2))
        queries.fill_(0.01)
        slots = torch.zeros(m, dtype=torch.int32, device=platform.device)
        positions = torch.arange(context - m, context, dtype=torch.int32, device=platform.device)
        calls = [
            partial(attend, queries, pages, slots, positions, layer, None, out, workspace=workspace)
            for layer in range(n_layers)
        ]
        found.append(AttentionSamples(m, context, probe_calls(platform, calls, n_layers, is_capturable, sampling)))
    return found


def _shape_samples(
    platform: GpuPlatform,
    shape: ProductShape,
    rows: Sequence[int],
    kernel: ProductKernel,
    sampling: Sampling,
    cycle_bytes: int,
) -> list[ProductSamples]:
    n_fitting = platform.free_bytes() // FREE_SHARE // shape.n_bytes
    n_matrices = max(1, min(-(-cycle_bytes // shape.n_bytes), n_fitting, MAX_MATRICES))
    tiles = platform.allocate((n_matrices, *shape.grid, shape.tile_bytes), torch.uint8).random_()
    tiles = tiles if shape.layout == "int4" else tiles.view(torch.int8)
    scales = platform.allocate((n_matrices, *shape.grid, TILE_ROWS), torch.float16).fill_(0.01)
    matrices = [kernel.prepared(shape, tiles[index], scales[index]) for index in range(n_matrices)]
    found = []
    for m in rows:
        x = platform.allocate((m, shape.n_columns), torch.float32).fill_(0.5)
        out = platform.allocate((m, shape.n_rows), torch.float32)
        calls = [partial(kernel.multiply, x, matrix, out) for matrix in matrices]
        seconds = probe_calls(platform, calls, n_matrices, kernel.is_capturable, sampling)
        found.append(ProductSamples(shape, m, n_matrices * shape.n_bytes, seconds))
    return found


def probe_calls(
    platform: GpuPlatform, calls: Sequence[Work], n_parts: int, is_capturable: bool, sampling: Sampling
) -> tuple[float, ...]:
    """Time all calls in a row, repeatedly, and return each repeat's seconds divided by n_parts."""

    def everything() -> None:
        for call in calls:
            call()

    calls[0]()  # compiles, which a recording does not allow
    work = platform.recorded(everything) if is_capturable else everything
    found = platform.seconds(work, 1)
    n_more = min(sampling.repeats - 1, int(sampling.max_s / found[0]))
    if n_more > 0:
        found += platform.seconds(work, n_more)
    return tuple(seconds / n_parts for seconds in found)
