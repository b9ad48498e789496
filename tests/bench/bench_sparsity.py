"""The neuron-sparse FFN against the dense one on the CPU. Prints tables; the last line is one JSON document.

    python tests/bench/bench_sparsity.py [--json] [--quick]

A gated FFN of Llama-2-7B's shape, 4096 x 11008, random weights, in layers that take turns, so that no cache holds them.
sparse: the gate in full by the tile matmul, the activation, then the rows of up and down of random active neurons;
predicted: of the gate, too, the rows of random neurons alone, twice as many, those active among them, after the two
small products of a predictor of rank 512. dense_ms: the same FFN by tile matmuls alone, in the same turns. ideal: bytes
read over the dense bytes, of the sparse one and of the predicted one.
over_ideal: ms / dense_ms / ideal. rows_ms, tiles_ms: up and down alone, every neuron active, for m tokens.
Medians over layers and turns; run it on a quiet machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.random_weights import CODEBOOK
from hetero_ee_cpu_ops.activate import activate
from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
from hetero_ee_cpu_ops.matmul import Matmul, TileMatrix
from hetero_ee_cpu_ops.neurons.masked_linear import MaskedLinear
from hetero_ee_cpu_ops.neurons.rows import RowMatrix
from hetero_ee_cpu_ops.neurons.sparse_ffn import SparseFfn
from hetero_ee_profiles.host.process import physical_core_count

WIDTH, N_NEURONS, RANK = 4096, 11008, 512
SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
TOKENS = (1, 4, 8, 128)


class Layer:
    """The FFN's matrices in tiles, and up and down in rows, of random codes."""

    def __init__(self, random: Any) -> None:
        self.random = random
        self.gate, self.gate_up = self._tiles(N_NEURONS, WIDTH), self._tiles(2 * N_NEURONS, WIDTH)
        self.up_tiles, self.down_tiles = self._tiles(N_NEURONS, WIDTH), self._tiles(WIDTH, N_NEURONS)
        self.up, self.down, self.gate_rows = self._rows(), self._rows(), self._rows()
        self.predictor = self._tiles(RANK, WIDTH), self._tiles(N_NEURONS, RANK)

    def _scales(self, shape: tuple[int, ...]) -> Any:
        return (self.random.random(shape, np.float32) * 0.01).astype(np.float16)

    def _tiles(self, n: int, k: int) -> TileMatrix:
        grid = (n // 16, k // 32)
        codes = self.random.integers(0, 256, (*grid, 256), np.uint8)
        return TileMatrix(codes, self._scales((*grid, 16)), 0, CODEBOOK)

    def _rows(self) -> RowMatrix:
        codes = self.random.integers(0, 256, (N_NEURONS, WIDTH // 2), np.uint8)
        return RowMatrix(codes, self._scales((N_NEURONS, WIDTH // 32)), 0, CODEBOOK, WIDTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; JSON is always the last line")
    parser.add_argument("--quick", action="store_true", help="3 turns instead of 15")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as cache:
        use_kernel_cache(Path(cache))
        layers = [Layer(random) for _ in range(3)]
        n_turns = 3 if arguments.quick else 15
        document = {str(n): measured(n, layers, n_turns) for n in sorted({physical_core_count(), 1}, reverse=True)}
    print_tables(document)
    print(json.dumps({"threads": document}))


def measured(n_threads: int, layers: list[Layer], n_turns: int) -> dict[str, Any]:
    pool = ThreadPool(n_threads)
    matmul, sparse_ffn, masked_linear = Matmul(pool), SparseFfn(pool), MaskedLinear(pool)
    random = np.random.default_rng(1)
    x = random.standard_normal((1, WIDTH), np.float32)
    values = random.standard_normal((1, N_NEURONS), np.float32)
    sets = {share: np.where(random.random(values.shape) < share, values, np.float32(0)) for share in SHARES}

    def dense(layer: Layer) -> None:
        matmul(activate(matmul(x, layer.gate_up), "silu", gated=True, pool=pool), layer.down_tiles)

    def sparse(active: Any) -> Callable[[Layer], None]:
        def run(layer: Layer) -> None:
            activate(matmul(x, layer.gate), "silu", gated=False, pool=pool)
            sparse_ffn(x, active, layer.up, layer.down)

        return run

    def predicted(active: Any) -> Callable[[Layer], None]:
        others = random.random(active.shape) < float((active != 0).mean())
        scores, may_skip = np.where((active != 0) | others, np.float32(1), np.float32(-1)), np.array([True])

        def run(layer: Layer) -> None:
            matmul(matmul(x, layer.predictor[0]), layer.predictor[1])
            first = masked_linear(x, scores, layer.gate_rows, None, may_skip)
            activate(first, "relu", gated=False, pool=pool)
            sparse_ffn(x, active, layer.up, layer.down)

        return run

    runs = [make(active) for make in (sparse, predicted) for active in sets.values()]
    dense_s, *times = in_turns([dense, *runs], layers, n_turns)
    rows = []
    for number, share in enumerate(SHARES):
        active = float((sets[share] != 0).mean())
        spared = min(1.0, 1 - (1 - active) ** 2) + RANK * (WIDTH + N_NEURONS) / (WIDTH * N_NEURONS)
        rows.append({"active": share})
        for name, gate, seconds in zip(
            ("sparse", "predicted"), (1.0, spared), times[number :: len(SHARES)], strict=True
        ):
            ideal, over_dense = (gate + 2 * active) / 3, seconds / dense_s
            rows[-1][name] = {"ms": seconds * 1e3, "ideal": ideal}
            rows[-1][name] |= {"over_dense": over_dense, "over_ideal": over_dense / ideal}
    result = {"dense_ms": dense_s * 1e3, "gated": rows, "tokens": {}}
    for m in TOKENS:
        result["tokens"][str(m)] = tokens_ms(matmul, sparse_ffn, layers, m, max(2, n_turns // m))
    pool.close()
    return result


def tokens_ms(matmul: Matmul, sparse_ffn: SparseFfn, layers: list[Layer], m: int, n_turns: int) -> dict[str, float]:
    random = np.random.default_rng(m)
    x, h = (random.standard_normal((m, n), np.float32) for n in (WIDTH, N_NEURONS))

    def tiles(layer: Layer) -> None:
        matmul(x, layer.up_tiles)
        matmul(h, layer.down_tiles)

    def rows(layer: Layer) -> None:
        sparse_ffn(x, h, layer.up, layer.down)

    times = in_turns([tiles, rows], layers, n_turns)
    return {"tiles_ms": times[0] * 1e3, "rows_ms": times[1] * 1e3}


def in_turns(actions: list[Callable[[Layer], None]], layers: list[Layer], n_turns: int) -> list[float]:
    """Median seconds of each; they take turns, so that drift hits all alike, each time with another layer."""
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(n_turns + 1):
        for layer in layers:
            for action, found in zip(actions, times, strict=True):
                start = time.perf_counter()
                action(layer)
                if turn:  # the first compiles
                    found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def print_tables(document: dict[str, Any]) -> None:
    print("| threads | active | gate | ms | dense ms | of dense | ideal | over ideal |")
    print("|---|---|---|---|---|---|---|---|")
    for threads, result in document.items():
        for gate in ("sparse", "predicted"):
            for row in result["gated"]:
                of = row[gate]
                print(
                    f"| {threads} | {row['active']:.0%} | {gate} | {of['ms']:.2f} | {result['dense_ms']:.2f} "
                    f"| {of['over_dense']:.2f} | {of['ideal']:.2f} | {of['over_ideal']:.2f} |"
                )
    print("\n| threads | tokens | up and down, rows ms | tiles ms |")
    print("|---|---|---|---|")
    for threads, result in document.items():
        for m, row in result["tokens"].items():
            print(f"| {threads} | {m} | {row['rows_ms']:.2f} | {row['tiles_ms']:.2f} |")


if __name__ == "__main__":
    main()
