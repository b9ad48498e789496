"""The CPU kernels against the memory's speed. Prints tables; the last line is one JSON document.

    python tests/bench/bench_cpu_ops.py [--json] [--quick] [--in-cache] [--layouts]

read_gbps: memory read bandwidth, the ceiling. gemv_gbps: bytes of weights and scales per second at m = 1. kappa: time
of m rows over the time of one. Shape 11008 x 4096; weights cycle through 600 MB, so that nothing sits in cache; with
--in-cache one matrix of 768 x 4096, 1.8 MB, so that memory has no part in it. All threads at the top level, one thread
under "one_thread"; "avx2" is the same in a child process whose code is compiled for AVX2 only. overhead_us_per_layer:
a decode step of a model with tiny weights and 64 layers, context 16, per layer.
"attention": see bench_attention.py.
--layouts: only what each layout of tiles takes for each byte, over linear int4 tiles, products in turns.
Linear tiles at the top level (like llama.cpp's Q4_0), fitted codebooks (what stores hold by default) under "codebook".
Every figure is the median of its repeats; run it on a quiet machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero_ee.config import cache_folder
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.random_weights import CODEBOOK
from hetero_ee.weights.tiles import SCALES_A_TILE, TILE_BYTES
from hetero_ee_profiles.host.process import physical_core_count

CYCLE_BYTES = 600_000_000
ROWS = (1, 2, 4, 8, 16)
KINDS = {
    "linear": tuple(range(-8, 8)),
    "codebook": CODEBOOK,
}
LAYOUTS = {name: (name, KINDS["linear"] if name.startswith("int4") else None) for name in TILE_BYTES}
LAYOUTS["int4 codebook"] = "int4", CODEBOOK
LAYOUT_ROWS = 1, 4, 8
AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+lzcnt,+cx16"


@dataclass(frozen=True, slots=True)
class Weights:
    """What is multiplied by: a matrix's shape, and how many bytes of such matrices take turns, how often."""

    shape: tuple[int, int] = (11008, 4096)
    cycle_bytes: int = CYCLE_BYTES
    n_passes: int = 5

    @property
    def n_bytes(self) -> int:
        """Of one matrix."""
        return self.shape[0] * self.shape[1] * 9 // 16


IN_CACHE = Weights((768, 4096), cycle_bytes=1, n_passes=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; JSON is always the last line")
    parser.add_argument("--quick", action="store_true", help="one pass over the weights instead of five")
    parser.add_argument("--in-cache", action="store_true", help="one small matrix, so that memory has no part in it")
    parser.add_argument("--layouts", action="store_true", help="only what each layout of tiles costs for each byte")
    parser.add_argument("--threads", type=int, default=physical_core_count())
    parser.add_argument("--kernels-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    use_kernel_cache(cache_folder())
    weights = IN_CACHE if arguments.in_cache else Weights(n_passes=1 if arguments.quick else 5)
    if arguments.layouts:
        print_layouts({n: layout_times(n, weights) for n in sorted({1, arguments.threads})})
        return
    document = measure(arguments.threads, weights)
    document["one_thread"] = measure(1, weights)
    if not arguments.kernels_only:
        document["overhead_us_per_layer"] = overhead_us_per_layer()
        document["avx2"] = in_child_for_avx2(arguments)
    print_tables(document)
    print(json.dumps(document))


def measure(threads: int, weights: Weights) -> dict[str, Any]:
    from bench_attention import attention_metrics

    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
    from hetero_ee_cpu_ops.matmul import Matmul

    pool = ThreadPool(threads)
    metrics: dict[str, Any] = {"threads": threads, "read_gbps": read_gbps(pool)}
    matmul = Matmul(pool)
    for name, codebook in KINDS.items():
        times = matmul_times(matmul, codebook, weights)
        row = {
            "gemv_gbps": weights.n_bytes / times[1] / 1e9,
            "kappa": {str(m): times[m] / times[1] for m in ROWS[1:]},
            "gops_16": 2 * weights.shape[0] * weights.shape[1] * 16 / times[16] / 1e9,
        }
        metrics |= row if name == "linear" else {name: row}
    pool.close()
    if weights != IN_CACHE:
        metrics["attention"] = attention_metrics(threads, weights.n_passes)
    return metrics


def read_gbps(pool: Any) -> float:
    from hetero_ee_cpu_ops.read import Read

    read, buffer = Read(pool), np.ones(CYCLE_BYTES // 2048 * 256, np.int64)
    read(buffer)
    return float(buffer.nbytes / median_s(lambda: read(buffer), 5) / 1e9)


def matmul_times(matmul: Any, codebook: tuple[int, ...], weights: Weights) -> dict[int, float]:
    """Median seconds of one product for each number of rows; rows take turns, so that drift hits all alike."""
    matrices = random_matrices("int4", codebook, weights)
    random = np.random.default_rng(1)
    inputs = {m: random.standard_normal((m, weights.shape[1]), np.float32) for m in ROWS}
    for x in inputs.values():
        matmul(x, matrices[0])
    times: dict[int, list[float]] = {m: [] for m in ROWS}
    for _ in range(weights.n_passes):
        for m, x in inputs.items():
            for matrix in matrices:
                start = time.perf_counter()
                matmul(x, matrix)
                times[m].append(time.perf_counter() - start)
    return {m: statistics.median(values) for m, values in times.items()}


def random_matrices(layout: str, codebook: tuple[int, ...] | None, weights: Weights) -> list[Any]:
    """As many as take turns."""
    from hetero_ee_cpu_ops.matmul import TileMatrix

    random = np.random.default_rng(0)
    grid = (weights.shape[0] // 16, weights.shape[1] // 32)
    return [
        TileMatrix(
            random.integers(0, 256, (*grid, TILE_BYTES[layout]), np.uint8).view(
                np.int8 if layout == "int8" else np.uint8
            ),
            (random.random((*grid, SCALES_A_TILE[layout])) * 0.01).astype(np.float16),
            0,
            codebook,
        )
        for _ in range(-(-weights.cycle_bytes // weights.n_bytes))
    ]


def layout_times(threads: int, weights: Weights) -> dict[str, dict[int, tuple[float, float]]]:
    """For m = 1, 4, 8: bytes per second, and seconds a byte over linear int4 tiles', the median of rounds.

    In a round each layout multiplies once, so that the machine's changes hit all alike.
    """
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
    from hetero_ee_cpu_ops.matmul import Matmul

    pool, one = ThreadPool(threads), replace(weights, cycle_bytes=1)
    matmul = Matmul(pool)
    matrices = {name: random_matrices(*layout, one)[0] for name, layout in LAYOUTS.items()}
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in matrices}
    for m in LAYOUT_ROWS:
        x = np.random.default_rng(m).standard_normal((m, weights.shape[1]), np.float32)
        rounds = [
            {name: per_byte_s(matmul, x, each) for name, each in matrices.items()}
            for _ in range(40 * weights.n_passes + 1)
        ]
        for name in matrices:
            speeds, ratios = zip(*((1 / each[name], each[name] / each["int4"]) for each in rounds[1:]), strict=True)
            found[name][m] = statistics.median(speeds), statistics.median(ratios)
    pool.close()
    return found


def per_byte_s(matmul: Any, x: Any, matrix: Any) -> float:
    start, n_bytes = time.perf_counter(), int(matrix.n_bytes)
    matmul(x, matrix)
    return (time.perf_counter() - start) / n_bytes


def print_layouts(found: dict[int, dict[str, dict[int, tuple[float, float]]]]) -> None:
    places = [(threads, m) for threads in found for m in LAYOUT_ROWS]
    print("| tiles |" + "".join(f" {threads} threads, m = {m} |" for threads, m in places))
    print("|---|" + "---|" * len(places))
    for name in LAYOUTS:
        cells = [found[threads][name][m] for threads, m in places]
        print(f"| {name} |" + "".join(f" {speed / 1e9:.1f}, {ratio:.2f} |" for speed, ratio in cells))
    print(json.dumps(found))


def median_s(action: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def overhead_us_per_layer() -> float:
    """Time of a decode step that is not reading weights: 64 layers of width 64, one row, context 16."""
    import torch

    from hetero_ee.hub.config_file import read_spec
    from hetero_ee.kv.batch import Batch
    from hetero_ee.models.blocks import all_tensors, decoder_blocks
    from hetero_ee.runtime.executors.cpu import CpuExecutor
    from hetero_ee.weights.model_weights import ModelWeights, is_quantized
    from hetero_ee.weights.quantizers import quantize

    n_layers = 64
    spec = read_spec(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": n_layers,
            "num_attention_heads": 2,
        }
    )
    weights = ModelWeights({}, {})
    for tensor in all_tensors(decoder_blocks(spec)):
        values = torch.randn(tensor.shape) * 0.1
        if is_quantized(tensor.role):
            weights.matrices[tensor.name] = quantize(values, "rtn")
        else:
            weights.vectors[tensor.name] = values
    executor = CpuExecutor(spec, weights, 64, 1)
    executor.cache.open(0)
    executor.hidden(Batch.of_sequence(0, 0, list(range(16))))

    def step() -> None:
        executor.hidden(Batch.of_sequence(0, 16, [1]))
        executor.cache.truncate(0, 16)

    step()
    return median_s(step, 200) / n_layers * 1e6


def in_child_for_avx2(arguments: argparse.Namespace) -> dict[str, Any]:
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    flags = [
        "--kernels-only",
        "--threads",
        str(arguments.threads),
        *(["--quick"] * arguments.quick),
        *(["--in-cache"] * arguments.in_cache),
    ]
    done = subprocess.run(
        [sys.executable, __file__, *flags], env=environment, capture_output=True, text=True, check=True
    )
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def print_tables(document: dict[str, Any]) -> None:
    from bench_attention import print_attention

    print("| code | threads | tiles | read GB/s | m = 1 GB/s | kappa 2 | 4 | 8 | 16 | GOPS at 16 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for code, metrics in (("native", document), ("AVX2", document.get("avx2"))):
        for part in (metrics, metrics["one_thread"]) if metrics else ():
            for name, row in (("linear", part), ("codebook", part["codebook"])):
                kappa = " | ".join(f"{row['kappa'][str(m)]:.2f}" for m in ROWS[1:])
                speeds = f"{part['read_gbps']:.1f} | {row['gemv_gbps']:.1f}"
                print(f"| {code} | {part['threads']} | {name} | {speeds} | {kappa} | {row['gops_16']:.0f} |")
    for code, metrics in (("native", document), ("AVX2", document.get("avx2"))):
        for part in (metrics, metrics["one_thread"]) if metrics else ():
            if "attention" in part:
                print_attention(code, part["threads"], part["attention"])
    if "overhead_us_per_layer" in document:
        print(f"decode step without weights: {document['overhead_us_per_layer']:.0f} us a layer")


if __name__ == "__main__":
    main()
