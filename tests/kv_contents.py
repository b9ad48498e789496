"""What a KV cache of any kind holds, read back for comparison."""

from typing import Any

from hetero_ee.kv.devices import DeviceCaches
from hetero_ee.kv.gpu import GpuKvCache
from hetero_ee_kernels.reference import read


def read_back(cache: Any, layer: int, sequence: int, first: int, end: int) -> Any:
    """Keys and values, fp32 (n_kv_heads, end - first, head_dim), of positions first..end-1."""
    if isinstance(cache, DeviceCaches):
        cache = cache.part(layer)
    if isinstance(cache, GpuKvCache):
        return read(cache.pages, cache._sequences[sequence].slot, cache.index(layer), first, end)
    return cache.read(layer, sequence, first, end)
