"""Speed of experts on the CPU, in a published model's shape, by this engine and, where it is installed, by llama.cpp.

    PYTHONPATH=. python tests/bench/bench_moe.py [--shape gpt-oss-20b] [--json] [--layers 2] [--threads 2]

First the experts alone: m tokens choose experts, at random or so that each keeps 45 % of its predecessor's. "union" is
the number of distinct experts, whose bytes over the time give GB/s; "over_limit" is the time over that of reading these
bytes at the memory's rate, which is measured first. Layers take turns, so that no expert is in the cache.
Then whole layers with a small attention: passes of m different or equal tokens, and of prompts, with logits, by both
engines in turns, of Qwen3-MoE's architecture whatever the shape. Weights are random: fitted codebooks here, Q4_0 in a
synthetic GGUF file there, both of 4.5 bits; gpt-oss-20b's experts are MXFP4 in both, in 4.5 bits here and 4.25 there.
Medians, and the best of the repeats for machines that are not quiet; "ratio" is llama.cpp's time over ours.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
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

N_HEADS, HEAD, VOCABULARY = 8, 64, 512
EMBEDDING, TOKENS = "token_embd.weight", "tokenizer.ggml.tokens"
FEW, PROMPT, CONTEXT, ROOM = (1, 2, 4, 8), 512, 64, 1024
KEPT = {"random": 0.0, "overlapping": 0.45}  # share of its predecessor's experts that a token keeps
DISTINCT = {"random": 400, "overlapping": 1}  # different tokens in a pass of whole layers


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
    parser.add_argument("--shape", choices=SHAPES, default=next(iter(SHAPES)))
    for name, default in (("--layers", 2), ("--threads", 2), ("--repeats", 9)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    use_kernel_cache(cache_folder())
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool

    shape = SHAPES[arguments.shape]
    spec = model(arguments.layers, shape)
    weights, pool = with_codebook(random_weights(spec), shape.codebook), ThreadPool(arguments.threads)
    document: dict[str, Any] = {
        "shape": arguments.shape,
        "threads": arguments.threads,
        "experts": list(experts_alone(spec, weights, pool, arguments.repeats)),
        "layers": list(whole_layers(spec, weights, pool, arguments.repeats)),
    }
    if arguments.json:
        print(json.dumps(document))
        return
    for line in (*document["experts"], *document["layers"]):
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in line.items()}
        print(", ".join(f"{name} {value}" for name, value in shown.items()))


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


def with_codebook(weights: ModelWeights, codebook: tuple[int, ...] | None) -> ModelWeights:
    """Return the weights with other values of the experts' codes."""
    if codebook is None:
        return weights
    changed = {name: replace(weight, codebook=codebook) for name, weight in weights.matrices.items() if ".moe." in name}
    return replace(weights, matrices=weights.matrices | changed)


def experts_alone(spec: ModelSpec, weights: Any, pool: Any, n_repeats: int) -> Iterator[dict[str, Any]]:
    from hetero_ee.ops.cpu import CpuOps

    ops, moe, draw = CpuOps(pool), spec.layer(0).ffn, np.random.default_rng(0)
    assert isinstance(moe, MoeSpec)
    layers = []
    for number in range(spec.n_layers):
        names = (f"layers.{number}.moe.{short}" for short in (moe.first, "down"))
        matrices = (ops.matrix(name, weights.matrices[name], None) for name in names)
        layers.append(Experts(*matrices, moe.activation, moe.expert_rows, moe.hidden_size, moe.router.n_experts))
    expert_bytes = sum(each.weight.n_bytes for each in (layers[0].first, layers[0].down)) / layers[0].n
    bytes_per_s = read_rate(pool)
    for m in (*FEW, PROMPT):
        for name, kept in KEPT.items():
            times, unions, rates = [], [], []
            for repeat in range(n_repeats * (4 if m < PROMPT else 1)):
                x = draw.standard_normal((m, moe.hidden_size), np.float32)
                routes = drawn_routes(draw, m, moe.router, kept)
                layer = layers[repeat % len(layers)]
                start_s = time.perf_counter()
                ops.add_experts(ops.expert_outputs(x, routes, layer), routes, layer, None)
                times.append(time.perf_counter() - start_s)
                unions.append(len(np.unique(routes[:, : moe.router.n_active])))
                rates.append(unions[-1] * expert_bytes / times[-1])
            rate = statistics.median(rates)
            found = {"routes": name, "m": m, "union": statistics.mean(unions), "ms": statistics.median(times) * 1e3}
            yield found | {
                "gb_per_s": rate / 1e9,
                "over_limit": bytes_per_s / rate,
                "over_limit_best": bytes_per_s / max(rates),
            }


def drawn_routes(draw: Any, m: int, router: RouterSpec, kept: float) -> Any:
    """Experts of each token, from the highest to the lowest, and equal weights."""
    k = router.n_active
    chosen: list[Any] = []
    for _ in range(m):
        old = [each for each in chosen[-1] if draw.random() < kept] if chosen else []
        new = [each for each in draw.permutation(router.n_experts) if each not in old]
        chosen.append(sorted([*old, *new[: k - len(old)]], reverse=True))
    return np.hstack([np.array(chosen), np.full((m, k), 1 / k)]).astype(np.float32)


def read_rate(pool: Any, n_bytes: int = 2**29) -> float:
    """Bytes per second at which all threads read memory."""
    from hetero_ee_cpu_ops.read import Read

    read, block = Read(pool), np.ones(n_bytes, np.uint8)
    return n_bytes / min(timed(lambda: read(block)) for _ in range(5))


def timed(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def whole_layers(spec: ModelSpec, weights: Any, pool: Any, n_repeats: int) -> Iterator[dict[str, Any]]:
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    executor = CpuExecutor(spec, weights, ROOM, pool)
    sequence = executor.cache.open_new()
    executor.hidden(Batch.of_sequence(sequence, 0, [7] * CONTEXT, is_prompt=True))

    def ours(m: int, n_distinct: int) -> float:
        tokens = [100 + number % n_distinct for number in range(m)]
        batch = Batch.of_sequence(sequence, CONTEXT, tokens, is_prompt=m == PROMPT)
        elapsed_s = timed(lambda: executor.logits(batch, range(m)))
        executor.cache.truncate(sequence, CONTEXT)
        return elapsed_s

    with TemporaryDirectory() as folder:
        engines: dict[str, Callable[[int, int], float]] = {"ours": ours}
        peer = None
        if find_spec("llama_cpp"):
            file = Path(folder) / "experts.gguf"
            write_gguf(spec, file)
            peer = LlamaCpp(file, pool.n_threads, ROOM, flash_attention=True)
            peer.fill(CONTEXT)

            def theirs(m: int, n_distinct: int) -> float:
                assert peer is not None
                peer.n_distinct = n_distinct
                return peer.step(m, m)  # of tokens without logits it leaves the last layer out

            engines["llama.cpp"] = theirs
        for m in (*FEW, PROMPT):
            for name, n_distinct in DISTINCT.items():
                found: dict[str, list[float]] = {engine: [] for engine in engines}
                for _ in range(n_repeats if m < PROMPT else max(1, n_repeats // 3)):
                    for engine, step in engines.items():
                        found[engine].append(step(m, n_distinct))
                line: dict[str, Any] = {"tokens": name, "m": m}
                for of, choose in (("", statistics.median), ("_best", min)):
                    times = {engine: choose(each) * 1e3 for engine, each in found.items()}
                    line |= {f"{engine}_ms{of}": each for engine, each in times.items()}
                    if peer is not None:
                        line[f"ratio{of}"] = times["llama.cpp"] / times["ours"]
                yield line
        if peer is not None:
            with closing(peer):
                pass


def write_gguf(spec: ModelSpec, file: Path, tokenizer_of: Path | None = None) -> None:
    """Write a file of architecture qwen3moe with random Q4_0 blocks, or MXFP4 ones for experts as wide as gpt-oss's.

    A code of 0, which stands for -8, is replaced by 8, for 0: weights have no mean then, with which all tokens would
    choose the same experts in deeper layers. For the same reason embeddings are larger than what layers add to them.

    Args:
        tokenizer_of: A GGUF file whose tokenizer this one gets.
    """
    import gguf

    moe = spec.layer(0).ffn
    assert isinstance(moe, MoeSpec)
    n_experts, draw, writer = moe.router.n_experts, np.random.default_rng(0), gguf.GGUFWriter(file, "qwen3moe")
    fields = _tokenizer_fields(tokenizer_of)
    n_tokens = VOCABULARY if tokenizer_of is None else next(len(each.data) for each in fields if each.name == TOKENS)
    hidden_size, size, types = moe.hidden_size, moe.size, gguf.GGMLQuantizationType
    of_experts = types.MXFP4 if hidden_size == SHAPES["gpt-oss-20b"].hidden_size else types.Q4_0
    sizes = {
        "block_count": spec.n_layers,
        "context_length": ROOM,
        "embedding_length": hidden_size,
        "feed_forward_length": size,
        "expert_feed_forward_length": size,
        "expert_count": n_experts,
        "expert_used_count": moe.router.n_active,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "vocab_size": n_tokens,
    }
    for name, value in sizes.items():
        writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    if tokenizer_of is None:
        writer.add_tokenizer_model("no_vocab")
    for field in fields:
        writer.add_key_value(field.name, field.contents(), *field.types[:2])

    def matrix(name: str, *shape: int, kind: Any = types.Q4_0) -> None:
        """Write random codes, each block's after its scale: fp16, or the exponent of 2^(e - 127) for MXFP4."""
        is_float = kind == types.Q4_0
        blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18 if is_float else 17), np.uint8)
        for half in (15, 240) if is_float else ():
            np.add(blocks, half & 136, out=blocks, where=blocks & half == 0)
        scale = (
            np.float16(1.0 if name == EMBEDDING else 0.2 * shape[-1] ** -0.5).tobytes() if is_float else bytes([119])
        )
        blocks[..., : len(scale)] = np.frombuffer(scale, np.uint8)
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def vector(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.ones(shape, np.float32))

    matrix(EMBEDDING, n_tokens, hidden_size)
    matrix("output.weight", n_tokens, hidden_size)
    vector("output_norm.weight", hidden_size)
    for number in range(spec.n_layers):
        layer = f"blk.{number}."
        for name in ("attn_norm", "ffn_norm"):
            vector(f"{layer}{name}.weight", hidden_size)
        for name in ("attn_q_norm", "attn_k_norm"):
            vector(f"{layer}{name}.weight", HEAD)
        for name in "qkv":
            matrix(f"{layer}attn_{name}.weight", N_HEADS * HEAD, hidden_size)
        matrix(layer + "attn_output.weight", hidden_size, N_HEADS * HEAD)
        router = draw.standard_normal((n_experts, hidden_size), np.float32) * np.float32(hidden_size**-0.5)
        writer.add_tensor(layer + "ffn_gate_inp.weight", router)
        shapes = {"gate": (size, hidden_size), "up": (size, hidden_size), "down": (hidden_size, size)}
        for name, shape in shapes.items():
            matrix(f"{layer}ffn_{name}_exps.weight", n_experts, *shape, kind=of_experts)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def _tokenizer_fields(file: Path | None) -> list[Any]:
    import gguf

    fields = [] if file is None else gguf.GGUFReader(file).fields.values()
    return [each for each in fields if each.name.startswith("tokenizer.")]


if __name__ == "__main__":
    main()
