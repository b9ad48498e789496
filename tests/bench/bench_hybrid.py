"""Speed of a hybrid of gated delta layers and attention, Qwen3.6-27B's layers, by this engine and by llama.cpp.

    pip install -e ".[bench]" && PYTHONPATH=. python tests/bench/bench_hybrid.py [--layers 8] [--threads 2]

Weights are random: fitted codebooks here, Q4_0 in a synthetic GGUF file there, both of 4.5 bits. A token is decoded
after a context of 128, and no logits are computed. The engines alternate; medians. The last line compares our decoding
with the layers' bytes at the memory's read bandwidth, which is measured first.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from llamacpp import LlamaCpp

from hetero_ee.config import cache_folder
from hetero_ee.kv.batch import Batch
from hetero_ee.models.hf_config import spec_from_hf
from hetero_ee.models.known_shapes import PARAMETERS, known_shapes
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.random_weights import random_weights

MODEL, VOCABULARY, PROMPT, CONTEXT, TEXT, ROOM = "qwen3.6-27b", 16384, 512, 128, 16, 1024
HIDDEN, FFN, N_HEADS, N_KV_HEADS, HEAD = 5120, 17408, 24, 4, 256
N_KEYS, N_VALUES, DIM, KERNEL, EVERY = 16, 48, 128, 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--layers", 8), ("--threads", 2), ("--repeats", 5)):
        parser.add_argument(name, type=int, default=default)
    arguments = parser.parse_args()
    n_layers, n_threads = arguments.layers, arguments.threads
    use_kernel_cache(cache_folder())
    from hetero_ee.runtime.executors.cpu import CpuExecutor  # kernels look where to be cached when imported
    from hetero_ee_cpu_ops.jit.thread_pool import ThreadPool
    from hetero_ee_cpu_ops.read import Read

    fields = {name: value for name, value in known_shapes()[MODEL].items() if name != PARAMETERS}
    spec = spec_from_hf(fields | {"num_hidden_layers": n_layers, "vocab_size": VOCABULARY}, MODEL)
    weights = random_weights(spec)
    n_bytes = sum(weight.n_bytes for name, weight in weights.matrices.items() if name.startswith("layers."))
    pool = ThreadPool(n_threads)
    bytes_per_s = read_rate(Read(pool))
    found: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "hybrid.gguf"
        write_gguf(file, n_layers)
        executor = CpuExecutor(spec, weights, ROOM, pool)
        with closing(LlamaCpp(file, n_threads, ROOM, flash_attention=True)) as peer:
            for _ in range(arguments.repeats):
                for name, seconds in (*ours(executor), *theirs(peer)):
                    found.setdefault(name, []).append(seconds)
    for name, times in found.items():
        print(f"{name}: {statistics.median(times) * 1e3:.1f} ms")
    kappas = [four / one for four, one in zip(found["four tokens, ours"], found["one token, ours"], strict=True)]
    print(f"kappa(4), a verification of 4 tokens over one token: {statistics.median(kappas):.2f}")
    limit_s = n_bytes / bytes_per_s
    ratio = min(found["one token, ours"]) / limit_s, statistics.median(found["one token, ours"]) / limit_s
    print(f"{n_bytes / 1e9:.2f} GB at {bytes_per_s / 1e9:.1f} GB/s: {limit_s * 1e3:.1f} ms; ours, best and median: "
          f"{ratio[0]:.2f} and {ratio[1]:.2f} times that")  # fmt: skip


def read_rate(read: Callable[[Any], Any], n_bytes: int = 2**30) -> float:
    """Bytes per second at which all threads read memory."""
    block = np.ones(n_bytes, np.uint8)
    return n_bytes / min(timed(lambda: read(block)) for _ in range(5))


def timed(run: Callable[[], Any]) -> float:
    start_s = perf_counter()
    run()
    return perf_counter() - start_s


def ours(executor: Any) -> Iterator[tuple[str, float]]:
    def read(n_tokens: int) -> int:
        sequence: int = executor.cache.open_new()
        executor.hidden(Batch.of_sequence(sequence, 0, [7] * n_tokens, is_prompt=True))
        return sequence

    def tokens(position: int, n_tokens: int = 1) -> float:
        executor.cache.settle(sequence, position)  # as the decoding loop does
        return timed(lambda: executor.hidden(Batch.of_sequence(sequence, position, [9] * n_tokens)))

    yield f"prompt of {PROMPT}, ours", timed(lambda: executor.cache.close(read(PROMPT)))
    sequence = read(CONTEXT)
    one, four = list[float](), list[float]()
    for position in range(CONTEXT, CONTEXT + 5 * TEXT, 5):
        one.append(tokens(position))
        four.append(tokens(position + 1, 4))
    yield "one token, ours", statistics.median(one)
    yield "four tokens, ours", statistics.median(four)
    executor.cache.close(sequence)


def theirs(peer: LlamaCpp) -> Iterator[tuple[str, float]]:
    peer.fill(0)  # a hybrid's sequence can only be forgotten whole
    yield f"prompt of {PROMPT}, llama.cpp", timed(lambda: peer.fill(PROMPT))
    peer.fill(0)
    peer.fill(CONTEXT)
    ends = range(CONTEXT + 1, CONTEXT + TEXT + 1)
    yield "one token, llama.cpp", statistics.median(timed(partial(peer.fill, end)) for end in ends)


def write_gguf(file: Path, n_layers: int) -> None:
    """Write a file of architecture qwen35 with random Q4_0 blocks."""
    import gguf

    draw, writer = np.random.default_rng(0), gguf.GGUFWriter(file, "qwen35")
    sizes = {
        "block_count": n_layers,
        "context_length": ROOM,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD // 4,
        "full_attention_interval": EVERY,
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": DIM,
        "ssm.group_count": N_KEYS,
        "ssm.time_step_rank": N_VALUES,
        "ssm.inner_size": N_VALUES * DIM,
    }
    for name, value in sizes.items():
        writer.add_uint32(f"qwen35.{name}", value)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35.rope.freq_base", 1e7)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen35")
    writer.add_array("tokenizer.ggml.tokens", [f"<t{number}>" for number in range(VOCABULARY)])
    writer.add_array("tokenizer.ggml.token_type", [1] * VOCABULARY)
    writer.add_array("tokenizer.ggml.merges", ["< t"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)

    def matrix(name: str, n_rows: int, n_columns: int) -> None:
        blocks = draw.integers(0, 256, (n_rows, n_columns // 32, 18), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.2 * n_columns**-0.5).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(n_rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def vector(name: str, *shape: int, value: float = 1.0) -> None:
        writer.add_tensor(name, np.full(shape, value, np.float32))

    matrix("token_embd.weight", VOCABULARY, HIDDEN)
    matrix("output.weight", VOCABULARY, HIDDEN)
    vector("output_norm.weight", HIDDEN)
    for number in range(n_layers):
        layer = f"blk.{number}."
        vector(layer + "attn_norm.weight", HIDDEN)
        vector(layer + "post_attention_norm.weight", HIDDEN)
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            matrix(f"{layer}ffn_{name}.weight", *shape)
        if (number + 1) % EVERY == 0:
            for name, n_heads in (("q", 2 * N_HEADS), ("k", N_KV_HEADS), ("v", N_KV_HEADS)):
                matrix(f"{layer}attn_{name}.weight", n_heads * HEAD, HIDDEN)
            matrix(layer + "attn_output.weight", HIDDEN, N_HEADS * HEAD)
            vector(layer + "attn_q_norm.weight", HEAD)
            vector(layer + "attn_k_norm.weight", HEAD)
            continue
        n_channels, n_values = (2 * N_KEYS + N_VALUES) * DIM, N_VALUES * DIM
        shapes = {"attn_qkv": n_channels, "attn_gate": n_values, "ssm_beta": N_VALUES, "ssm_alpha": N_VALUES}
        for name, n_rows in shapes.items():
            matrix(f"{layer}{name}.weight", n_rows, HIDDEN)
        matrix(layer + "ssm_out.weight", HIDDEN, n_values)
        vector(layer + "ssm_conv1d.weight", n_channels, KERNEL)
        vector(layer + "ssm_a", N_VALUES, value=-1.0)
        vector(layer + "ssm_dt.bias", N_VALUES, value=0.0)
        vector(layer + "ssm_norm.weight", DIM)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


if __name__ == "__main__":
    main()
