"""Addresses beyond 2^31 bytes and 2^31 elements: a cache that large gives the bits of a small one. Its memory is
reserved, and taken only where it is written."""

from typing import Any

import numpy as np
import pytest

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.ops.cpu_rows import sequence_cache
from hetero_ee_cpu_ops.attention.attention import Attention
from hetero_ee_cpu_ops.attention.kv_table import kv_table
from hetero_ee_cpu_ops.attention.kv_write import KvWrite
from tests.cpu_support import assert_same_bits

N_KV_HEADS, GROUP, HEAD_DIM, CAPACITY = 2, 2, 64, 32768
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
POSITIONS = (0, 1, 63, 64, 20_000, CAPACITY - 1)


def attended(kind: str, n_layers: int, window: int | None) -> Any:
    """Attention at POSITIONS in the last of so many layers, where only they have keys and values that are not zero."""
    cache = CpuKvCache(n_layers, N_KV_HEADS, HEAD_DIM, CAPACITY, kind=kind)
    cache.open(0)
    cache.admit(Batch.of_sequence(0, 0, [0] * CAPACITY))
    shape, layer, width = (n_layers, N_KV_HEADS, HEAD_DIM), n_layers - 1, N_KV_HEADS * HEAD_DIM
    table = kv_table([cache.view(0, sequence_cache)] * len(POSITIONS), POSITIONS, shape, kind)
    random = np.random.default_rng(0)
    new = random.normal(size=(len(POSITIONS), 2 * width)).astype(np.float32)
    KvWrite(*shape, kind).write(new, table, layer, 0, width)
    queries = random.normal(size=(len(POSITIONS), GROUP * width)).astype(np.float32)
    attention = Attention(n_layers, GROUP * N_KV_HEADS, N_KV_HEADS, HEAD_DIM, kind)
    return attention.attend(queries, table, layer, window)


@pytest.mark.parametrize("window", [None, 5000])
@pytest.mark.parametrize("kind", ELEMENT_BYTES)
def test_a_layer_beyond_two_gigabytes(kind: str, window: int | None) -> None:
    layer_bytes = ELEMENT_BYTES[kind] * N_KV_HEADS * CAPACITY * HEAD_DIM
    n_layers = 2**31 // layer_bytes + 2
    small = attended(kind, 1, window)
    assert np.abs(small).min(axis=1).max() > 0
    assert_same_bits(attended(kind, n_layers, window), small)
