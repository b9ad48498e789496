"""Compile the kernels that most models need for their first token, and store them in the kernel cache.

Usage: python -m hetero_ee_cpu_ops.ahead FOLDER GROUP ... with groups from GROUPS. Numba compiles one function at a
time per process, so one process per group is faster. Each kernel is compiled by calling it once on small arrays, since
some take their signature from the first call. Kernels that the cache already holds are only loaded. The process exits
when its standard input is closed, so that it never outlives its parent.
"""

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

HEAD_DIM = 16
CODEBOOK = tuple(range(-16, 16, 2))  # selects the same kernels as codebooks fitted to a model, whose entries are small


def attention(group: int = 1, n_tokens: int = 1) -> None:
    """Compile attention for an fp16 KV cache.

    Args:
        group: query heads per key head.
        n_tokens: tokens in the batch, all of one sequence.
    """
    from hetero_ee_cpu_ops.attention.attention import Attention

    x = np.ones((n_tokens, group * HEAD_DIM), np.float32)
    Attention(1, group, 1, HEAD_DIM, "fp16").attend(x, _kv_table(n_tokens), 0, None)


def _kv_table(n_tokens: int) -> Any:
    from hetero_ee_cpu_ops.attention.kv_table import SequenceCache, kv_table

    cache = SequenceCache(*(np.zeros((1, 1, n_tokens, HEAD_DIM), np.uint16) for _ in range(2)))
    return kv_table([cache] * n_tokens, range(n_tokens), (1, 1, HEAD_DIM), "fp16")


def products() -> None:
    """Compile the products with int8 tiles and with int4 tiles of a fitted codebook, which every profile measures."""
    from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix

    pool, scales = ThreadPool(2), np.ones((1, 1, 16), np.float16)
    tiles = np.zeros((1, 1, 512), np.int8), np.zeros((1, 1, 256), np.uint8)
    try:
        for each, codebook in zip(tiles, (None, CODEBOOK), strict=True):
            Matmul(pool)(np.ones((1, 32), np.float32), TileMatrix(each, scales, 0, codebook))
    finally:
        pool.close()


def others() -> None:
    """Compile the other operations of a layer, and the memory read that profiles measure."""
    from hetero_ee_cpu_ops.activate import activate
    from hetero_ee_cpu_ops.attention.kv_write import KvWrite
    from hetero_ee_cpu_ops.attention.rope import Rope
    from hetero_ee_cpu_ops.embed import embed_int8
    from hetero_ee_cpu_ops.norm import rms_norm
    from hetero_ee_cpu_ops.read import Read

    x = np.ones((1, 2 * HEAD_DIM), np.float32)
    Rope([1.0] * (HEAD_DIM // 2), 1.0).rotate(x, np.zeros(1, np.int64), 0, 1, HEAD_DIM)
    activate(x, "silu", gated=True)
    tiles, scales = np.zeros((1, 1, 512), np.int8), np.zeros((1, 1, 16), np.uint16)
    embed_int8(tiles, scales, 1.0, (16, 32), np.zeros(1, np.int64))
    rms_norm(x, np.ones(x.shape[1], np.float32), 1e-6)
    KvWrite(1, 1, HEAD_DIM, "fp16").write(x, _kv_table(1), 0, 0, HEAD_DIM)
    Read(ThreadPool(1))(np.zeros(256, np.uint8))


GROUPS = {group.__name__: group for group in (attention, products, others)}  # the slowest first


def main(arguments: Sequence[str]) -> None:
    folder, *names = arguments
    threading.Thread(target=_end_with_input, daemon=True).start()
    numba.config.CACHE_DIR = folder  # before a kernel is compiled
    for name in names:
        GROUPS[name]()


def _end_with_input() -> None:
    os.read(0, 1)  # reading sys.stdin would hold a lock for which Python waits at exit
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
