"""Compile the kernels of a typical first token into a cache folder: python -m hetero_ee_cpu_ops.ahead FOLDER GROUP ...

Numba compiles one function at a time per process, so several processes with a group each are faster. Every kernel is
compiled by using it once, since some get their signature from their first call. What is compiled already stays.
The process ends when its standard input does, so that it never outlives the one that started it.
"""

import os
import sys
import threading
from collections.abc import Sequence

import numba
import numpy as np

from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

HEAD_DIM = 16
CODEBOOK = tuple(range(-16, 16, 2))  # its kind of tile is that of fitted ones with small entries


def attention(group: int = 1, n_tokens: int = 1) -> None:
    """Write keys and values of one head to an fp16 cache, and attend to them with `group` query heads per token."""
    from hetero_ee_cpu_ops.attention.attention import Attention
    from hetero_ee_cpu_ops.attention.kv_table import SequenceCache, kv_table
    from hetero_ee_cpu_ops.attention.kv_write import KvWrite

    shape, n_queries = (1, 1, HEAD_DIM), group * HEAD_DIM
    cache = SequenceCache(*(np.zeros((1, 1, n_tokens, HEAD_DIM), np.uint16) for _ in range(2)))
    table = kv_table([cache] * n_tokens, range(n_tokens), shape, "fp16")
    x = np.ones((n_tokens, n_queries + 2 * HEAD_DIM), np.float32)
    KvWrite(*shape, "fp16").write(x, table, 0, n_queries, n_queries + HEAD_DIM)
    Attention(1, group, 1, HEAD_DIM, "fp16").attend(x, table, 0, None)


def products() -> None:
    """Multiply by tiles of int8 and of a fitted codebook, which every measurement of a machine needs."""
    from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix

    pool, scales = ThreadPool(2), np.ones((1, 1, 16), np.float16)
    tiles = np.zeros((1, 1, 512), np.int8), np.zeros((1, 1, 256), np.uint8)
    try:
        for each, codebook in zip(tiles, (None, CODEBOOK), strict=True):
            Matmul(pool)(np.ones((1, 32), np.float32), TileMatrix(each, scales, 0, codebook))
    finally:
        pool.close()


def others() -> None:
    """Use the other operations of a layer, and what measuring reads memory with."""
    from hetero_ee_cpu_ops.activate import activate
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
    Read(ThreadPool(1))(np.zeros(256, np.uint8))


GROUPS = {group.__name__: group for group in (attention, products, others)}  # the slowest first


def main(arguments: Sequence[str]) -> None:
    folder, *names = arguments
    threading.Thread(target=_end_with_input, daemon=True).start()
    numba.config.CACHE_DIR = folder  # before a kernel is compiled
    for name in names:
        GROUPS[name]()


def _end_with_input() -> None:
    os.read(0, 1)  # sys.stdin would hold a lock that Python waits for at its end
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
