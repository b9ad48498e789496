"""Attention on the CPU against the memory's speed and the machine's fp32 rate: what bench_cpu_ops.py prints of it.

decode_gbps: one token, bytes of keys and values read per second, by type of cache, query heads a key head and context
(8 key heads of 128). prompt: 128 tokens at the end of a context, operations per second, and their share of what
multiply-adds do in registers (fma_gflops). layer_kappa: seconds of m tokens over those of one through a layer of
Llama-2-7B's shapes behind 2048 positions, weights included, by type of cache. Keys, values and weights cycle through
200 MB or more, so that none of them stays in a cache; medians.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numba.core.registry import cpu_target

from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.models.known_shapes import known_spec
from hetero_ee.runtime.executors.cpu import CpuExecutor
from hetero_ee.weights.random_weights import random_weights
from hetero_ee_cpu_ops.attention.attention import Attention
from hetero_ee_cpu_ops.attention.kv_table import DTYPES, SequenceCache, kv_table
from hetero_ee_cpu_ops.jit.kernel_files import compiled
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.simd.bytes import target_has, zeros
from hetero_ee_cpu_ops.simd.tuples import add_products, store_tile

CYCLE_BYTES = 200_000_000
CONTEXTS, GROUPS, N_KV_HEADS, HEAD_DIM = (512, 1024, 2048, 16384), (1, 4, 8), 8, 128
PROMPTS = ((128, 1), (2048, 1), (2048, 4))  # context, query heads a key head
PROMPT_TOKENS = 128
KAPPA_TOKENS, KAPPA_CONTEXT, KAPPA_LAYERS = (1, 2, 4, 8, 16), 2048, 3
ROWS, CELLS, F32 = (0,) * 2, (0,) * 4, np.float32(0)  # a tile that registers hold on every target
FMA_STEPS = 20_000


@compiled
def _four_chains(address: int, n: int) -> None:
    """n times four multiply-adds of 16 lanes that wait for nothing but themselves: 8 of AVX2's 16 registers."""
    totals = zeros(CELLS)
    for _ in range(n):
        totals = add_products(totals, ROWS, address, 64, address + 128, 64, F32)
    store_tile(totals, ROWS, address + 512, 128)


@compiled
def _twelve_chains(address: int, n: int) -> None:
    """The same with twelve, 12 of AVX-512's 32 registers."""
    a, b, c = zeros(CELLS), zeros(CELLS), zeros(CELLS)
    for _ in range(n):
        a = add_products(a, ROWS, address, 64, address + 128, 64, F32)
        b = add_products(b, ROWS, address, 64, address + 256, 64, F32)
        c = add_products(c, ROWS, address, 64, address + 384, 64, F32)
    store_tile(a, ROWS, address + 512, 128)
    store_tile(b, ROWS, address + 768, 128)
    store_tile(c, ROWS, address + 1024, 128)


def attention_metrics(threads: int, passes: int) -> dict[str, Any]:
    """Everything that the module's docstring names. passes: over all layers."""
    pool = ThreadPool(threads)
    fma_gflops = fma_gflops_of_one_thread() * threads
    metrics: dict[str, Any] = {"fma_gflops": fma_gflops, "decode_gbps": {}, "prompt": {}, "layer_kappa": {}}
    for kind in DTYPES:
        memory = np.tile(random_bytes(kind, 2**20), CYCLE_BYTES // 2**19)  # keys, then values
        metrics["decode_gbps"][kind] = {
            f"group {group}": {str(n): decode_gbps(pool, memory, kind, group, n, passes) for n in CONTEXTS}
            for group in GROUPS
        }
        for context, group in PROMPTS:
            gflops = prompt_gflops(pool, memory, kind, group, context, passes)
            row = {"gflops": gflops, "share": gflops / fma_gflops}
            metrics["prompt"].setdefault(kind, {})[f"context {context}, group {group}"] = row
        metrics["layer_kappa"][kind] = layer_kappa(threads, kind, passes)
    pool.close()
    return metrics


def fma_gflops_of_one_thread() -> float:
    data = np.zeros(512, np.float32)
    is_wide = target_has(cpu_target.target_context, "avx512f")
    multiply_adds, n = (_twelve_chains, 12) if is_wide else (_four_chains, 4)
    multiply_adds(data.ctypes.data, 1)
    seconds = median_s([lambda: multiply_adds(data.ctypes.data, FMA_STEPS)], 20)
    return n * 32 * FMA_STEPS / seconds / 1e9


def decode_gbps(pool: ThreadPool, memory: Any, kind: str, group: int, context: int, passes: int) -> float:
    seconds, layer_bytes = attention_s(pool, memory, kind, group, context, 1, passes)
    return layer_bytes / seconds / 1e9


def prompt_gflops(pool: ThreadPool, memory: Any, kind: str, group: int, context: int, passes: int) -> float:
    seconds, _ = attention_s(pool, memory, kind, group, context, PROMPT_TOKENS, passes)
    n_seen = sum(range(context - PROMPT_TOKENS + 1, context + 1))
    return 4 * n_seen * N_KV_HEADS * group * HEAD_DIM / seconds / 1e9


def attention_s(
    pool: ThreadPool, memory: Any, kind: str, group: int, context: int, m: int, passes: int
) -> tuple[float, int]:
    """Seconds of one layer for the last m tokens of a context, and the bytes of its keys and values."""
    part_bytes = N_KV_HEADS * context * HEAD_DIM * DTYPES[kind].itemsize
    n_layers = max(1, CYCLE_BYTES // (2 * part_bytes))
    if m > 1:
        n_layers = min(n_layers, 3)
    shape, n = (n_layers, N_KV_HEADS, HEAD_DIM), n_layers * part_bytes
    parts = [memory[at : at + n].view(DTYPES[kind]).reshape(*shape[:2], context, HEAD_DIM) for at in (0, n)]
    scales = [np.full((*shape[:2], context), 0.01, np.float32)] * 2 if kind == "int8" else [None, None]
    table = kv_table([SequenceCache(*parts, *scales)] * m, range(context - m, context), shape, kind)
    queries = np.random.default_rng(0).standard_normal((m, N_KV_HEADS * group * HEAD_DIM), np.float32)
    attention, out = Attention(n_layers, N_KV_HEADS * group, *shape[1:], kind, pool), np.empty_like(queries)

    def of_layer(layer: int) -> Callable[[], Any]:
        return lambda: attention.attend(queries, table, layer, None, out)

    return median_s([of_layer(layer) for layer in range(n_layers)], passes), 2 * part_bytes


def random_bytes(kind: str, n_bytes: int) -> Any:
    """So many bytes of normally distributed values as the cache stores them."""
    values = np.random.default_rng(0).standard_normal(n_bytes // DTYPES[kind].itemsize, np.float32)
    if kind == "int8":
        values = np.clip(values * 40, -127, 127)
    return values.astype({"fp32": np.float32, "fp16": np.float16, "int8": np.int8}[kind]).view(np.uint8)


def layer_kappa(threads: int, kind: str, passes: int) -> dict[str, float]:
    """Of a layer of Llama-2-7B's shapes, the mean of a pass through KAPPA_LAYERS of them; m takes turns."""
    spec = replace(
        known_spec("llama-2-7b"), n_layers=KAPPA_LAYERS, vocab_size=64, sliding_windows=(None,) * KAPPA_LAYERS
    )
    cache = CpuKvCache(spec.n_layers, spec.n_kv_heads, spec.head_dim, KAPPA_CONTEXT + max(KAPPA_TOKENS), kind=kind)
    executor = CpuExecutor(spec, random_weights(spec), KAPPA_CONTEXT + max(KAPPA_TOKENS), threads, cache=cache)
    sequence, layers = executor.cache.open_new(), executor.blocks[1:-2]
    executor.hidden(Batch.of_sequence(sequence, 0, [1] * KAPPA_CONTEXT))
    times: dict[int, list[float]] = {m: [] for m in KAPPA_TOKENS}
    for _ in range(2 + 4 * passes):
        for m in KAPPA_TOKENS:
            batch, hidden = Batch.of_sequence(sequence, KAPPA_CONTEXT, [1] * m), torch.ones(m, spec.hidden_size)
            executor.cache.admit(batch, range(KAPPA_LAYERS))
            start = time.perf_counter()
            executor.forward(hidden, batch, layers)
            times[m].append(time.perf_counter() - start)
            executor.cache.truncate(sequence, KAPPA_CONTEXT)
    executor.close()
    medians = {m: statistics.median(found) for m, found in times.items()}
    return {str(m): medians[m] / medians[1] for m in KAPPA_TOKENS[1:]}


def median_s(actions: Sequence[Callable[[], Any]], passes: int) -> float:
    """Of all actions' passes, after one that is not timed."""
    times: list[float] = []
    for number in range(1 + passes):
        for action in actions:
            start = time.perf_counter()
            action()
            if number:
                times.append(time.perf_counter() - start)
    return statistics.median(times)


def print_attention(code: str, threads: int, metrics: dict[str, Any]) -> None:
    contexts = " | ".join(str(n) for n in CONTEXTS)
    print(f"| {code}, {threads} threads: one token, GB/s | {contexts} | kappa 2 | 4 | 8 | 16 |")
    print("|---" * (1 + len(CONTEXTS) + len(KAPPA_TOKENS) - 1) + "|")
    for kind, groups in metrics["decode_gbps"].items():
        for group, by_context in groups.items():
            kappa = [f"{value:.2f}" for value in metrics["layer_kappa"][kind].values()]
            cells = kappa if group == f"group {GROUPS[0]}" else [""] * len(kappa)
            speeds = [f"{value:.1f}" for value in by_context.values()]
            print(f"| {kind}, {group} | {' | '.join([*speeds, *cells])} |")
    print(f"multiply-adds in registers: {metrics['fma_gflops']:.0f} GFLOPS")
    for kind, rows in metrics["prompt"].items():
        for name, row in rows.items():
            print(f"prompt of {PROMPT_TOKENS}, {kind}, {name}: {row['gflops']:.0f} GFLOPS, {row['share']:.0%} of that")
