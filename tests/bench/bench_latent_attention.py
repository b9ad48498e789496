"""Latent attention of GLM-4.7-Flash's shape on one thread of the CPU, against the processor's fp32 rate.

    python tests/bench/bench_latent_attention.py [--prompts 512,2048] [--passes 5]

20 heads share one cached vector of 576 features, whose last 512 are its value. Per type of cache: GFLOPS of whole
prompts of one layer and milliseconds of one token after them, medians. Products count 2 (576 + 512) operations per
query head and position seen. Compared with multiply-adds in registers and with torch's matrix product of 1,024 x 1,024.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_attention import fma_gflops_of_one_thread, median_s, random_bytes

from hetero_ee_cpu_ops.attention.attention import Attention
from hetero_ee_cpu_ops.attention.kv_table import DTYPES, SequenceCache, kv_table

N_HEADS, HEAD_DIM, VALUE_DIM, SIDE = 20, 576, 512, 1024


def latent_attention(kind: str, context: int, m: int) -> Callable[[], Any]:
    """One layer's attention of the last m tokens of a context."""
    n_bytes = context * HEAD_DIM * DTYPES[kind].itemsize
    part = random_bytes(kind, n_bytes).view(DTYPES[kind]).reshape(1, 1, context, HEAD_DIM)
    scales = [np.full((1, 1, context), 0.01, np.float32)] * 2 if kind == "int8" else [None, None]
    table = kv_table([SequenceCache(part, part, *scales)] * m, range(context - m, context), (1, 1, HEAD_DIM), kind)
    queries = np.random.default_rng(0).standard_normal((m, N_HEADS * HEAD_DIM), np.float32)
    attention = Attention(1, N_HEADS, 1, HEAD_DIM, kind, value_dim=VALUE_DIM)
    out = np.empty((m, N_HEADS * VALUE_DIM), np.float32)
    return lambda: attention.attend(queries, table, 0, None, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    matrix = torch.randn(SIDE, SIDE)
    matmul_s = median_s([lambda: matrix @ matrix], 20)
    print(f"multiply-adds {fma_gflops_of_one_thread():.0f} GFLOPS, torch {2 * SIDE**3 / matmul_s / 1e9:.0f} GFLOPS")
    for kind in DTYPES:
        for n in map(int, options.prompts.split(",")):
            prompt_s = median_s([latent_attention(kind, n, n)], options.passes)
            token_s = median_s([latent_attention(kind, n, 1)], 10 * options.passes)
            gflops = N_HEADS * (HEAD_DIM + VALUE_DIM) * n * (n + 1) / prompt_s / 1e9
            print(f"{kind}, {n} tokens: {gflops:.1f} GFLOPS; one token {1000 * token_s:.2f} ms")


if __name__ == "__main__":
    main()
