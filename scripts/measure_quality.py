"""Measure what int4 costs in quality: each quantizer vs. fp32 on a text, and activations, keys and values of fewer than
32 bits. Print tables, or one document with --json.

    python scripts/measure_quality.py --text stories.txt [--model MODEL] [--tokens 50000] [--also FILE ...] [--json]

Mean KL divergence of the next-token distributions (fp32 to quantized, nats), share of positions with the same likeliest
token, ratio of perplexities, bits per byte. Windows of at most --window tokens, each from an empty context. --also FILE
compares the same model in other formats (GGUF files or folders), as they are and as stores keep them, with the
quantizers whose embedding and head are int8, instead of printing the other tables. measure_frontier.py compares
calibrated stores and llama.cpp's types by size.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from stories import read_stories
from torch import Tensor

from hetero_ee.config import cache_folder, demo_model_folder
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.kv.batch import Batch
from hetero_ee.kv.cpu import CpuKvCache
from hetero_ee.layers.state import KV_BYTES
from hetero_ee.models.spec import ModelSpec
from hetero_ee.ops.torch_ops import BatchedTorchOps
from hetero_ee.options.engine import ACTIVATION_TERMS
from hetero_ee.runtime.executors.executor import Executor
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.checkpoint import Checkpoint, weight_files
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import ModelWeights, as_stored, expanded, is_quantized, load_dense, with_terms
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.quantizers import INT4_QUANTIZERS, quantize
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.reader import open_store
from hetero_ee.weights.weight import Weight

COMPARED = ("mean_kl_nats", "same_top1", "perplexity_ratio")
CANDIDATES = [
    Quantization(matrices, vocabulary) for matrices in reversed(INT4_QUANTIZERS) for vocabulary in (matrices, "int8")
]


@dataclass(frozen=True, slots=True)
class Quality:
    """One row: a choice of quantizers, its size and what it costs."""

    matrices: str
    vocabulary: str
    n_bytes: int
    bits_per_weight: float
    mean_kl_nats: float
    same_top1: float
    perplexity_ratio: float
    bits_per_byte: float


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    folder = gguf_folder(arguments.model) if arguments.model.is_file() else arguments.model
    spec = read_spec(folder)
    tokenizer = Tokenizer.load(folder, spec.vocab_size)
    windows = list(token_windows(tokenizer, read_stories([arguments.text]), arguments.window, arguments.tokens))
    n_tokens = sum(len(window) - 1 for window in windows)
    n_text_bytes = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    checkpoint = open_checkpoint(folder, spec)
    exact = ReferenceExecutor(spec, load_dense(checkpoint), arguments.window, BatchedTorchOps())
    truth = [log_probabilities(exact, window) for window in windows]
    candidates = [each for each in CANDIDATES if each.vocabulary == "int8"] if arguments.also else CANDIDATES
    rows = [measure(checkpoint, quantization, truth, windows, n_text_bytes) for quantization in candidates]
    for path in arguments.also:
        rows += measure_import(path, truth, windows, n_text_bytes)
    beside = {} if arguments.also else activations_and_cache(folder, spec, arguments.window, windows)
    if not arguments.json:
        print_tables(rows, beside, n_tokens)
    else:
        document = {"schema": 2, "n_tokens": n_tokens, "rows": [asdict(row) for row in rows]}
        print(json.dumps(document | {"beside_weights": beside}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=demo_model_folder())
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens of the text to measure on")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="the same model in other formats")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def token_windows(tokenizer: Tokenizer, stories: list[str], window: int, n_tokens: int) -> Iterator[list[int]]:
    """Windows of the stories' tokens, until n_tokens are covered; every story begins one."""
    n_covered = 0
    for story in stories:
        ids = tokenizer.encode(story)
        for first in range(0, len(ids) - 1, window):
            yield ids[first : first + window]
            n_covered += min(window, len(ids) - first)
            if n_covered >= n_tokens:
                return


def measure(
    checkpoint: Checkpoint, quantization: Quantization, truth: list[Tensor], windows: list[list[int]], n_text_bytes: int
) -> Quality:
    executor = executor_of(checkpoint.spec, weights := quantized(checkpoint, quantization), windows)
    bits = weights.n_bytes * 8 / weights.n_weights
    metrics = compare(executor, truth, windows, n_text_bytes)
    return Quality(quantization.matrices, quantization.vocabulary, weights.n_bytes, bits, **metrics)


def executor_of(spec: ModelSpec, weights: ModelWeights, windows: list[list[int]]) -> Executor:
    return ReferenceExecutor(as_stored(spec, weights), expanded(weights), max(map(len, windows)), BatchedTorchOps())


def measure_import(path: Path, truth: list[Tensor], windows: list[list[int]], n_text_bytes: int) -> Iterator[Quality]:
    """Yield the quality of a checkpoint's or GGUF file's own weights, and of the store made from it."""
    folder = gguf_folder(path) if path.is_file() else path
    spec, n_bytes = read_spec(folder), sum(file.stat().st_size for file in weight_files(folder))
    dense = load_dense(open_checkpoint(folder, spec))
    kept = stored(folder, spec)
    for what, weights, size in (("in the file", dense, n_bytes), ("as kept here", expanded(kept), kept.n_bytes)):
        executor = ReferenceExecutor(spec, weights, max(map(len, windows)), BatchedTorchOps())
        metrics = compare(executor, truth, windows, n_text_bytes)
        yield Quality(path.stem, what, size, size * 8 / dense.n_weights, **metrics)


def stored(folder: Path, spec: ModelSpec) -> ModelWeights:
    """The weights of the store that is made of a model by default, mapped from files that are deleted already."""
    with tempfile.TemporaryDirectory() as temporary:
        return open_store(convert(folder, spec, Path(temporary) / "store", Quantization.of_model(folder, None)), spec)


def activations_and_cache(
    folder: Path, spec: ModelSpec, window: int, windows: list[list[int]]
) -> dict[str, dict[str, float]]:
    """The CPU kernels' activations, and each type of keys and values, against fp32 on the same default weights."""
    use_kernel_cache(cache_folder())
    from hetero_ee.runtime.executors.cpu import CpuExecutor

    weights = stored(folder, spec)
    dense, size = expanded(weights), (spec.n_layers, spec.n_kv_heads, spec.head_dim, window)

    def with_cache(kind: str) -> Executor:
        return ReferenceExecutor(spec, dense, window, BatchedTorchOps(), cache=CpuKvCache(*size, kind=kind))

    others: dict[str, Executor] = {f"{kind} keys and values": with_cache(kind) for kind in KV_BYTES if kind != "fp32"}
    for kind, n_terms in ACTIVATION_TERMS.items():
        cache, its = CpuKvCache(*size, kind="fp32"), with_terms(weights, n_terms)
        others[f"{kind} activations"] = CpuExecutor(spec, its, window, threads=1, cache=cache)
    truth = [log_probabilities(with_cache("fp32"), tokens) for tokens in windows]
    found = {name: compare(executor, truth, windows, n_text_bytes=1) for name, executor in others.items()}
    return {name: {of: metrics[of] for of in COMPARED} for name, metrics in found.items()}


def compare(executor: Executor, truth: list[Tensor], windows: list[list[int]], n_text_bytes: int) -> dict[str, float]:
    """The metrics of `executor` on the windows; truth: the exact log-probabilities of each."""
    kl = same = nats = exact_nats = 0.0
    n_tokens = 0
    for window, theirs in zip(windows, truth, strict=True):
        ours = log_probabilities(executor, window)
        targets = torch.tensor(window[1:])[:, None]
        kl += float((theirs.exp() * (theirs - ours)).sum())
        same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        nats -= float(ours.gather(1, targets).sum())
        exact_nats -= float(theirs.gather(1, targets).sum())
        n_tokens += len(window) - 1
    return {
        "mean_kl_nats": kl / n_tokens,
        "same_top1": same / n_tokens,
        "perplexity_ratio": math.exp((nats - exact_nats) / n_tokens),
        "bits_per_byte": nats / math.log(2) / n_text_bytes,
    }


def quantized(checkpoint: Checkpoint, quantization: Quantization) -> ModelWeights:
    """The checkpoint's weights as a store would hold them."""
    matrices: dict[str, Weight] = {}
    vectors: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors():
        values = checkpoint.tensor(tensor.name)
        if is_quantized(tensor.role):
            matrices[tensor.name] = quantize(values, quantization.quantizer_of(tensor.role))
        else:
            vectors[tensor.name] = values
    return ModelWeights(matrices, vectors)


def log_probabilities(executor: Executor, window: list[int]) -> Tensor:
    """(len(window) - 1, vocab), fp32 of a float64 softmax: the prediction at every position but the last."""
    executor.cache.open(0)
    logits = executor.logits(Batch.of_sequence(0, 0, window[:-1]), range(len(window) - 1))
    executor.cache.close(0)
    return torch.log_softmax(logits.double(), -1).float()


def print_tables(rows: list[Quality], beside_weights: dict[str, dict[str, float]], n_tokens: int) -> None:
    print(f"{n_tokens} tokens")
    print("| matrices | embedding and head | MB | bits a weight | mean KL (nats) | same top-1 | perplexity ratio |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.matrices} | {row.vocabulary} | {row.n_bytes / 1e6:.2f} | {row.bits_per_weight:.2f} "
            f"| {row.mean_kl_nats:.5f} | {row.same_top1:.4f} | {row.perplexity_ratio:.4f} |"
        )
    if beside_weights:
        print("\n| rounded | mean KL (nats) | same top-1 | perplexity ratio |\n|---|---|---|---|")
    for name, metrics in beside_weights.items():
        kl, same, ratio = (metrics[of] for of in COMPARED)
        print(f"| {name} | {kl:.1e} | {same:.4f} | {ratio:.6f} |")


if __name__ == "__main__":
    main()
