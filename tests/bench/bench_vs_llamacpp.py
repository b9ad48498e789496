"""One random model in both formats, run by this engine and by llama.cpp alternately. The last line is one JSON
document.

    pip install -e ".[bench]" && python tests/bench/bench_vs_llamacpp.py [--json] [--layers 8] [--repeats 9]

Llama-2-7B's layer shapes, 8 layers, 32,000 tokens, every matrix at 4.5 bits a weight (theirs Q4_0, ours codebook tiles,
head and embedding too), fp32 KV cache in ours and fp16 in theirs. A step is a whole pass: m tokens of one sequence
behind a context of 16, logits for all of them (for the prompt's last token in prefill). Ratios are their median time
over ours, both measured alternately in one run; run it on a quiet machine. llama.cpp is built by pip for the machine
it is installed on.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_ee.hub.config_file import read_spec
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.batch import Batch
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.weights.model_weights import ModelWeights, is_quantized
from hetero_ee.weights.tiles import padded_shape
from hetero_ee.weights.weight import TileWeight
from hetero_ee_profiles.host.process import physical_core_count

CONTEXT = 16
PREFILL_TOKENS = 128
PAUSE_S, STEPS_A_TURN = (
    0.1,
    3,
)  # both engines' threads spin for a while after their work; neither shall meet the other's
STEPS = {"decode": 1, "batch4": 4, "batch8": 8, "prefill128": PREFILL_TOKENS}
CODEBOOK = (-32, -23, -18, -14, -10, -7, -4, -1, 1, 4, 7, 10, 14, 18, 22, 28)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; JSON is always the last line")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=physical_core_count())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = llama_spec(arguments.layers)
    with tempfile.TemporaryDirectory() as folder:
        use_kernel_cache(Path(folder))
        file = Path(folder) / "random.gguf"
        write_gguf(spec, file)
        weights = random_weights(spec)
        document = compare(spec, weights, file, arguments.threads, arguments.repeats)
        document["one_thread"] = compare(spec, weights, file, 1, arguments.repeats)
    print_table(document)
    print(json.dumps(document))


def llama_spec(n_layers: int) -> ModelSpec:
    return read_spec(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": n_layers,
            "num_attention_heads": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        }
    )


def compare(spec: ModelSpec, weights: ModelWeights, file: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Median times of each step, the two engines alternating."""
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    executor = CpuExecutor(spec, weights, 512, threads)
    engines = {"ours": our_steps(executor), "theirs": their_steps(file, threads)}
    document: dict[str, Any] = {"threads": threads}
    for name, m in STEPS.items():
        times: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(repeats):
            for engine, step in engines.items():
                time.sleep(PAUSE_S)
                step(m)  # wakes this engine's threads
                times[engine] += [step(m) for _ in range(STEPS_A_TURN)]
        medians = {engine: statistics.median(values) for engine, values in times.items()}
        document[f"{name}_ratio"] = medians["theirs"] / medians["ours"]
        document[f"{name}_s"] = medians
    executor.close()
    return document


def our_steps(executor: Executor) -> Callable[[int], float]:
    executor.cache.open(0)
    executor.hidden(Batch.of_sequence(0, 0, list(range(CONTEXT))))

    def step(m: int) -> float:
        start = time.perf_counter()
        executor.logits(Batch.of_sequence(0, CONTEXT, list(range(100, 100 + m))), wanted_rows(m))
        elapsed = time.perf_counter() - start
        executor.cache.truncate(0, CONTEXT)
        return elapsed

    return step


def wanted_rows(m: int) -> list[int]:
    return [m - 1] if m == PREFILL_TOKENS else list(range(m))


def their_steps(file: Path, threads: int) -> Callable[[int], float]:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, 512
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(PREFILL_TOKENS, 0, 1)

    def decode(first: int, m: int) -> None:
        batch.n_tokens = m
        for row in range(m):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = 100 + row, first + row, 1
            batch.seq_id[row][0], batch.logits[row] = 0, row in wanted_rows(m)
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_get_logits(context)  # waits for the result

    decode(0, CONTEXT)

    def step(m: int, kept: Any = (model, silent)) -> float:
        start = time.perf_counter()
        decode(CONTEXT, m)
        elapsed = time.perf_counter() - start
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, CONTEXT, -1)
        return elapsed

    return step


def random_weights(spec: ModelSpec) -> ModelWeights:
    """Tiles of random codes: the bytes of a real model of this shape, without quantizing one."""
    random, weights = np.random.default_rng(0), ModelWeights({}, {})
    for tensor in all_tensors(decoder_blocks(spec)):
        if not is_quantized(tensor.role):
            weights.vectors[tensor.name] = torch.ones(tensor.shape)
            continue
        n_rows, n_columns = padded_shape(*tensor.shape)
        grid = (n_rows // 16, n_columns // 32)
        tiles = torch.from_numpy(random.integers(0, 256, (*grid, 256), np.uint8))
        scales = torch.full((*grid, 16), 3e-4, dtype=torch.float16)
        weights.matrices[tensor.name] = TileWeight(tiles, scales, 0, CODEBOOK, *tensor.shape)
    return weights


def gguf_names(n_layers: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "token_embd.weight", (32000, 4096)
    for layer in range(n_layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{layer}.{name}.weight", (4096, 4096)
        yield f"blk.{layer}.ffn_gate.weight", (11008, 4096)
        yield f"blk.{layer}.ffn_up.weight", (11008, 4096)
        yield f"blk.{layer}.ffn_down.weight", (4096, 11008)
    yield "output.weight", (32000, 4096)


def write_gguf(spec: ModelSpec, file: Path) -> None:
    """The same shapes in Q4_0: blocks of 32 weights, an fp16 scale and 16 bytes of codes each."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(spec.max_context_tokens)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.ffn_size)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    random = np.random.default_rng(0)
    for name, (n_rows, n_columns) in gguf_names(spec.n_layers):
        blocks = random.integers(0, 256, (n_rows, n_columns // 32, 18), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(4e-3).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(n_rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    norms = [f"blk.{layer}.{name}.weight" for layer in range(spec.n_layers) for name in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm.weight"]:
        writer.add_tensor(name, np.ones(spec.hidden_size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def print_table(document: dict[str, Any]) -> None:
    print("| threads | step | llama.cpp ms | ours ms | ratio |\n|---|---|---|---|---|")
    for part in (document, document["one_thread"]):
        for name in STEPS:
            times = part[f"{name}_s"]
            row = f"{times['theirs'] * 1e3:.1f} | {times['ours'] * 1e3:.1f} | {part[f'{name}_ratio']:.2f}"
            print(f"| {part['threads']} | {name} | {row} |")


if __name__ == "__main__":
    main()
