"""Speed of experts on the CPU, in a published model's shape, by this engine and, where it is installed, by llama.cpp.

    PYTHONPATH=. python tests/bench/bench_moe.py [--shape gpt-oss-20b] [--json] [--layers 4] [--threads 2]

First the experts alone: m tokens choose experts, at random or so that each keeps 45 % of its predecessor's. "union" is
the number of distinct experts, whose bytes over the time give GB/s; "over_limit" is the time over that in which a loop
that only reads gets as many bytes, right after it. Layers take turns, so that no expert is in the cache.
Then whole layers with a small attention: passes of m tokens, different or each twice, and of prompts, with logits, by
both engines and the reading loop in turns, of Qwen3-MoE's architecture whatever the shape. Weights are random: fitted
codebooks here, Q4_0 in a synthetic GGUF file there, both of 4.5 bits; gpt-oss-20b's experts are MXFP4 in both, in 4.5
bits here and 4.25 there. Routers and embeddings are the same in both: routers of bf16 values, as published ones, which
llama.cpp reads as fp32, and embeddings so large that a token's experts depend on it alone. So both engines use the same
experts, "union" per layer, and others in each pass.
Medians, and the best of the repeats for machines that are not quiet; "ratio" is llama.cpp's time over ours, and
"ratio_limit" over that of reading our bytes, which no engine's ratio exceeds. Both engines' weights are in anonymous
memory, in huge pages as far as "huge_pages" says. Before an engine's turn the other's threads fall asleep; its first
passes are not timed, until the caches hold its own code and data again, as they do within a text.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from experts_gguf import write_gguf
from llamacpp import LlamaCpp

from hetero_ee.config import cache_folder
from hetero_ee.kv.batch import Batch
from hetero_ee.layers.moe import MoeSpec, RouterSpec
from hetero_ee.layers.ops import Experts
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.gguf_blocks import MXFP4_CODEBOOK
from hetero_ee.weights.model_weights import ModelWeights
from hetero_ee.weights.random_weights import random_weights
from hetero_ee.weights.weight import TileWeight

N_HEADS, HEAD, VOCABULARY = 8, 64, 512
FEW, PROMPT, CONTEXT, ROOM = (1, 2, 4, 8), 512, 64, 1024
KEPT = {"random": 0.0, "overlapping": 0.45}  # share of its predecessor's experts that a token keeps
N_DISTINCT = 400  # most different tokens of a pass of whole layers
REPEATED = {"random": 1, "overlapping": 2}  # how often each is in the pass
EMBEDDING_GROWTH = 11  # powers of two: residual additions then change no choice of experts
N_UNTIMED, N_TIMED = 6, 4  # passes of few tokens in an engine's turn
QUIET_S = 0.01  # after which neither engine's idle threads spin
HUGE_PAGE, LARGE = 2**21, 2**26  # bytes of a page, and of a mapping that holds weights
READ_BYTES = 2**29  # that the reading loop has to choose from
COLLAPSE = 25  # Linux's MADV_COLLAPSE: makes huge pages at once


class Shape(NamedTuple):
    """Sizes of a layer's experts. codebook: of their weights, None for the one of random weights."""

    hidden_size: int
    size: int
    n_experts: int
    n_active: int
    codebook: tuple[int, ...] | None = None


SHAPES = {
    "qwen3.6-35b-a3b": Shape(2048, 512, 256, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, MXFP4_CODEBOOK),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="both by default")
    for name, default in (("--layers", 4), ("--threads", 2), ("--repeats", 9)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    use_kernel_cache(cache_folder())
    from hetero_ee_cpu_ops.heap import keep_freed_memory
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

    keep_freed_memory()  # as executors do

    with closing(ThreadPool(arguments.threads)) as pool:
        documents = [measured(name, arguments, pool) for name in arguments.shape or SHAPES]
    if arguments.json:
        print(json.dumps(documents))
        return
    for document in documents:
        print(f"{document['shape']}, {document['threads']} threads, {document['huge_pages']:.0%} in huge pages")
        for line in (*document["experts"], *document["layers"]):
            shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in line.items()}
            print(", ".join(f"{name} {value}" for name, value in shown.items()))


def measured(name: str, arguments: argparse.Namespace, pool: Any) -> dict[str, Any]:
    shape, read = SHAPES[name], reader(pool)
    spec = model(arguments.layers, shape)
    weights = adapted(random_weights(spec), shape.codebook)
    return {
        "shape": name,
        "n_layers": arguments.layers,
        "threads": arguments.threads,
        "experts": list(experts_alone(spec, weights, pool, read, arguments.repeats)),
        "layers": list(whole_layers(spec, weights, pool, read, arguments.repeats, is_mxfp4=shape.codebook is not None)),
        "huge_pages": huge_share(),
    }


def model(n_layers: int, shape: Shape) -> ModelSpec:
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": n_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": ROOM,
        "num_experts": shape.n_experts,
        "num_experts_per_tok": shape.n_active,
        "moe_intermediate_size": shape.size,
        "norm_topk_prob": True,
    }
    return spec_from_hf(fields, "bench_moe")


def adapted(weights: ModelWeights, codebook: tuple[int, ...] | None) -> ModelWeights:
    """Return the weights with larger embeddings, bf16 routers, and other values of the experts' codes unless None."""
    tokens = weights.matrices["embedding.tokens"]
    assert isinstance(tokens, TileWeight)
    changed: dict[str, Any] = {"embedding.tokens": replace(tokens, exponent=tokens.exponent + EMBEDDING_GROWTH)}
    for name, weight in weights.matrices.items():
        if codebook is not None and ".moe." in name and isinstance(weight, TileWeight):
            changed[name] = replace(weight, codebook=codebook)
    routers = {name: each.bfloat16().float() for name, each in weights.vectors.items() if name.endswith("router")}
    return replace(weights, matrices=weights.matrices | changed, vectors=weights.vectors | routers)


def experts_alone(
    spec: ModelSpec, weights: ModelWeights, pool: Any, read: Callable[[float], float], n_repeats: int
) -> Iterator[dict[str, Any]]:
    from hetero_ee.ops.cpu import CpuOps

    ops, moe, draw = CpuOps(pool), spec.layer(0).ffn, np.random.default_rng(0)
    assert isinstance(moe, MoeSpec)
    layers = []
    for number in range(spec.n_layers):
        names = (f"layers.{number}.moe.{short}" for short in (moe.first, "down"))
        first, down = (ops.matrix(name, weights.matrices[name], None) for name in names)
        layers.append(Experts(first, down, moe.activation, moe.expert_rows, moe.hidden_size, moe.router.n_experts))
    expert_bytes = bytes_of_expert(spec, weights)
    for m in (*FEW, PROMPT):
        for name, kept in KEPT.items():
            times: list[float] = []
            limits: list[float] = []
            unions: list[float] = []
            for repeat in range(-len(layers), n_repeats * (4 if m < PROMPT else 1)):
                x = draw.standard_normal((m, moe.hidden_size), np.float32)
                routes = drawn_routes(draw, m, moe.router, kept)
                layer, union = layers[repeat % len(layers)], len(np.unique(routes[:, : moe.router.n_active]))
                read(expert_bytes)  # wakes the threads
                start_s = time.perf_counter()
                ops.expert_sums(x, routes, layer, None)
                found = time.perf_counter() - start_s, read(union * expert_bytes), union
                if repeat >= 0:  # the first turn warms up
                    for values, value in zip((times, limits, unions), found, strict=True):
                        values.append(value)
            over = [each / limit for each, limit in zip(times, limits, strict=True)]
            each_s, limit_s = (min(map(truediv, seconds, unions)) for seconds in (times, limits))  # of an expert
            n_bytes = statistics.mean(unions) * expert_bytes
            yield {
                "routes": name,
                "m": m,
                "union": statistics.mean(unions),
                "mb": n_bytes / 1e6,
                "ms": statistics.median(times) * 1e3,
                "gb_per_s": n_bytes / statistics.median(times) / 1e9,
                "read_gb_per_s": n_bytes / statistics.median(limits) / 1e9,
                "over_limit": statistics.median(over),
                "over_limit_best": each_s / limit_s,
            }


def bytes_of_expert(spec: ModelSpec, weights: ModelWeights) -> float:
    moe = spec.layer(0).ffn
    assert isinstance(moe, MoeSpec)
    matrices = (weights.matrices[f"layers.0.moe.{short}"] for short in (moe.first, "down"))
    return sum(matrix.n_bytes for matrix in matrices) / moe.router.n_experts


def drawn_routes(draw: Any, m: int, router: RouterSpec, kept: float) -> Any:
    """Experts of each token, from the highest to the lowest, and equal weights."""
    k = router.n_active
    chosen: list[Any] = []
    for _ in range(m):
        old = [each for each in chosen[-1] if draw.random() < kept] if chosen else []
        new = [each for each in draw.permutation(router.n_experts) if each not in old]
        chosen.append(sorted([*old, *new[: k - len(old)]], reverse=True))
    return np.hstack([np.array(chosen), np.full((m, k), 1 / k)]).astype(np.float32)


def reader(pool: Any) -> Callable[[float], float]:
    """Return a function that reads so many bytes with all threads, and returns the seconds."""
    from hetero_ee_cpu_ops.read import Read

    read, block, draw = Read(pool), np.ones(READ_BYTES, np.uint8), np.random.default_rng(0)

    def seconds(n_bytes: float) -> float:
        n_read = min(READ_BYTES, int(n_bytes) // 256 * 256)
        first = int(draw.integers((READ_BYTES - n_read) // 256 + 1)) * 256
        return timed(lambda: read(block[first : first + n_read])) * n_bytes / n_read

    return seconds


def timed(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def whole_layers(
    spec: ModelSpec,
    weights: ModelWeights,
    pool: Any,
    read: Callable[[float], float],
    n_repeats: int,
    *,
    is_mxfp4: bool,
) -> Iterator[dict[str, Any]]:
    draw, passes = np.random.default_rng(0), Passes(chosen_experts(spec, weights), bytes_of_pass(spec, weights))
    with TemporaryDirectory() as folder, ExitStack() as opened:
        engines: dict[str, Callable[[int, int, int], float]] = {"ours": our_pass(spec, weights, pool)}
        if find_spec("llama_cpp"):
            file = Path(folder) / "experts.gguf"
            write_gguf(spec, file, weights=weights, is_mxfp4=is_mxfp4)
            peer = LlamaCpp(file, pool.n_threads, ROOM, flash_attention=True, mapped=False)
            opened.enter_context(closing(peer))
            peer.fill(CONTEXT)
            use_huge_pages()

            def theirs(m: int, first: int, n_distinct: int) -> float:
                peer.first_token, peer.n_distinct = first, n_distinct
                return peer.step(m, m)  # of tokens without logits it leaves the last layer out

            engines["llama.cpp"] = theirs
        engines["read"] = lambda m, first, n_distinct: read(passes.n_bytes(first, n_distinct))
        timed_in_turns(engines, 1, 1, n_repeats, draw)  # the system still moves pages after so much memory was filled
        for m in (*FEW, PROMPT):
            for name, repeated in REPEATED.items():
                n_distinct = min(N_DISTINCT, -(-m // repeated))
                found, firsts = timed_in_turns(engines, m, n_distinct, n_repeats, draw)
                line: dict[str, Any] = {"tokens": name, "m": m}
                line["union"] = statistics.mean(passes.union(first, n_distinct) for first in firsts)
                for of, choose in (("", statistics.median), ("_best", min)):
                    times = {engine: choose(each) * 1e3 for engine, each in found.items()}
                    line |= {f"{engine}_ms{of}": each for engine, each in times.items()}
                    if "llama.cpp" in times:
                        line[f"ratio{of}"] = times["llama.cpp"] / times["ours"]
                        line[f"ratio_limit{of}"] = times["llama.cpp"] / times["read"]
                yield line


class Passes(NamedTuple):
    """What passes of tokens in a row read. chosen: see chosen_experts; the rest is of bytes_of_pass."""

    chosen: Any
    bytes_of: tuple[float, float]

    def union(self, first: int, n_distinct: int) -> float:
        """Return the number of distinct experts per layer."""
        return float(self.chosen[first : first + n_distinct].any(0).sum(1).mean())

    def n_bytes(self, first: int, n_distinct: int) -> float:
        of_expert, others = self.bytes_of
        return self.union(first, n_distinct) * self.chosen.shape[1] * of_expert + others


def bytes_of_pass(spec: ModelSpec, weights: ModelWeights) -> tuple[float, float]:
    """Return the bytes of an expert, and of everything else that a pass reads."""
    others = sum(matrix.n_bytes for name, matrix in weights.matrices.items() if ".attention." in name or "head" in name)
    routers = sum(2 * vector.numel() for name, vector in weights.vectors.items() if name.endswith("router"))
    return bytes_of_expert(spec, weights), others + routers


def timed_in_turns(
    engines: dict[str, Callable[[int, int, int], float]], m: int, n_distinct: int, n_repeats: int, draw: Any
) -> tuple[dict[str, list[float]], list[int]]:
    """Return each engine's seconds for passes of the same tokens, and their first ones."""
    found: dict[str, list[float]] = {engine: [] for engine in engines}
    used: list[int] = []
    for _ in range(n_repeats if m < PROMPT else max(1, n_repeats // 3)):
        n_untimed, n_timed = (N_UNTIMED, N_TIMED) if m < PROMPT else (0, 1)
        firsts = draw.integers(VOCABULARY - N_DISTINCT, size=n_untimed + n_timed).tolist()
        used += firsts[n_untimed:]
        for engine, step in engines.items():
            time.sleep(QUIET_S)
            found[engine] += [step(m, first, n_distinct) for first in firsts][n_untimed:]
    return found, used


def use_huge_pages() -> None:
    """Move large anonymous memory into huge pages, for which NumPy asks and llama.cpp does not."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode = line.split()[:5]
        start, end = (int(each, 16) for each in span.split("-"))
        if inode == "0" and access.startswith("rw") and end - start >= LARGE:
            first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), COLLAPSE)


def huge_share() -> float:
    """Return the share of this process's anonymous memory that is in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines[1:])}
    return kib["AnonHugePages"] / kib["Anonymous"]


def our_pass(spec: ModelSpec, weights: ModelWeights, pool: Any) -> Callable[[int, int, int], float]:
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    executor = CpuExecutor(spec, weights, ROOM, pool)
    sequence = executor.cache.open_new()
    executor.hidden(Batch.of_sequence(sequence, 0, [7] * CONTEXT, is_prompt=True))

    def ours(m: int, first: int, n_distinct: int) -> float:
        tokens = [first + number % n_distinct for number in range(m)]
        batch = Batch.of_sequence(sequence, CONTEXT, tokens, is_prompt=m == PROMPT)
        elapsed_s = timed(lambda: executor.logits(batch, range(m)))
        executor.cache.truncate(sequence, CONTEXT)
        return elapsed_s

    return ours


def chosen_experts(spec: ModelSpec, weights: ModelWeights) -> Any:
    """Return whether a token's embedding chooses an expert of a layer: bool (VOCABULARY, n_layers, n_experts)."""
    moe, x = spec.layer(0).ffn, weights.matrices["embedding.tokens"].dequantize()[:VOCABULARY]
    assert isinstance(moe, MoeSpec)
    scores = [x @ weights.vectors[f"layers.{number}.moe.router"].T for number in range(spec.n_layers)]
    best = torch.stack(scores, 1).topk(moe.router.n_active).indices
    return torch.zeros(VOCABULARY, spec.n_layers, moe.router.n_experts).scatter_(2, best, 1).bool().numpy()


if __name__ == "__main__":
    main()
