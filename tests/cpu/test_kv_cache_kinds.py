"""CpuKvCache and the CPU kernels on the same storage: the same bytes written, the same contents attended to."""

from typing import Any

import numpy as np
import pytest
import torch

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.ops.cpu_rows import sequence_cache
from hetero_ee.ops.torch_ops import TorchOps
from hetero_ee_cpu_ops.attention.attention import Attention
from hetero_ee_cpu_ops.attention.kv_table import kv_table
from hetero_ee_cpu_ops.attention.kv_write import KvWrite
from tests.cpu_support import assert_same_bits

KINDS = ("fp32", "fp16", "int8")
N_LAYERS, LAYER, MAX_TOKENS = 3, 4, 400
HELD = (1, 4, 5)
ATTENTION_TOLERANCE = 3e-6  # of the largest value, as for the attention itself


def filled(kind: str, n_kv_heads: int, head_dim: int, x: Any, *, by_kernel: bool) -> CpuKvCache:
    """Two sequences with the rows of x, fp32 (m, 2, heads, head_dim), one and one alternately."""
    cache = CpuKvCache(N_LAYERS, n_kv_heads, head_dim, MAX_TOKENS, layers=HELD, kind=kind)
    for sequence in range(2):
        cache.open(sequence)
    rows = rows_of(len(x))
    cache.admit(rows)
    if by_kernel:
        table = places(cache, rows)
        width = n_kv_heads * head_dim
        KvWrite(N_LAYERS, n_kv_heads, head_dim, kind).write(x.reshape(len(x), -1), table, cache.index(LAYER), 0, width)
    else:
        cache.write(LAYER, rows, *torch.from_numpy(x).unbind(1))
    return cache


def rows_of(m: int) -> Batch:
    return Batch((0,) * m, tuple(row % 2 for row in range(m)), tuple(row // 2 for row in range(m)))


def places(cache: CpuKvCache, batch: Batch) -> Any:
    views = [cache.view(sequence, sequence_cache) for sequence in batch.sequences]
    return kv_table(views, batch.positions, (N_LAYERS, cache.n_kv_heads, cache.head_dim), cache.kind)


def stored(cache: CpuKvCache, sequence: int) -> list[Any]:
    view = cache.view(sequence, sequence_cache)
    parts = (view.keys, view.values, view.key_scales, view.value_scales)
    return [part for part in parts if part is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("magnitude", [1.0, 3e-31, 1e-29, 3e4, 3e38])
def test_both_write_the_same_bytes(kind: str, magnitude: float) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (600, 2, 3, 80)).astype(np.float32) * np.float32(magnitude)
    x[0], x[1, 0, 1] = 0.0, 0.0
    mine, kernel = (filled(kind, 3, 80, x, by_kernel=by_kernel) for by_kernel in (False, True))
    for sequence in range(2):
        found, expected = (stored(cache, sequence) for cache in (mine, kernel))
        for part, kernel_s in zip(found, expected, strict=True):
            assert_same_bits(part, kernel_s)
            assert np.isfinite(part.view(np.float16) if kind == "fp16" else part).all()
        assert any(part.any() for part in found) == (magnitude != 3e-31 or kind != "int8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 7])
def test_attention_reads_what_the_cache_reads(kind: str, window: int | None) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 2, 2, 20)).astype(np.float32)
    queries = rng.normal(size=(300, 6, 20)).astype(np.float32)
    cache, rows = filled(kind, 2, 20, x, by_kernel=False), rows_of(300)
    attention = Attention(N_LAYERS, 6, 2, 20, kind)
    found = attention.attend(queries.reshape(300, -1), places(cache, rows), cache.index(LAYER), window)
    expected = TorchOps().attention(torch.from_numpy(queries), cache, LAYER, rows, window).flatten(1).numpy()
    assert np.abs(found - expected).max() <= ATTENTION_TOLERANCE * np.abs(x).max()
