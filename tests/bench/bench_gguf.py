"""What importing GGUF files costs in quality: a model in each of llama.cpp's types, by this engine and by llama.cpp.

    pip install -e ".[bench,gguf,test]" && PYTHONPATH=. python tests/bench/bench_gguf.py --text stories_b.txt

The demo model is written as a GGUF file in F16, which llama.cpp's own quantizer makes the other types of. KL divergence
is that of the next token from the model in fp32, over windows of 400 tokens: of the weights as the file has them, in
fp32 (what the file's maker paid); of those as this engine keeps them, in fp32 (what the import adds); and of llama.cpp.
Nothing depends on the machine's speed.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetero_ee.config import demo_model_folder
from hetero_ee.hub.config_file import read_spec
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.kv.batch import Batch
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.gguf_checkpoint import open_checkpoint
from hetero_ee.weights.model_weights import ModelWeights, as_stored, load_dense
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.conversion import convert
from hetero_ee.weights.store.import_report import imported_types
from hetero_ee.weights.store.manifest import matrix_bits, read_manifest
from hetero_ee.weights.store.reader import open_store
from tests.gguf_models import write_gguf

TYPES = {  # llama.cpp's numbers (llama_ftype)
    **{"Q4_0": 2, "IQ4_NL": 25, "Q8_0": 7, "Q5_0": 8, "Q4_1": 3, "Q5_1": 9},
    **{"IQ4_XS": 30, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18},
}
WINDOW, N_WINDOWS = 400, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    demo = demo_model_folder()
    spec = read_spec(demo)
    text = arguments.text.read_text()[: 20 * WINDOW * N_WINDOWS]
    ids = Tokenizer.load(demo, spec.vocab_size).encode(text)[1:]
    starts = range(0, N_WINDOWS * WINDOW, WINDOW)
    windows = [[0, *ids[start : start + WINDOW - 1]] for start in starts]
    expected = log_probabilities(spec, load_dense(open_checkpoint(demo, spec)), windows)
    with tempfile.TemporaryDirectory() as folder:
        for name, file in files(demo, arguments.types, Path(folder)):
            its = gguf_folder(file)
            spec = read_spec(its)
            store = convert(its, spec, Path(folder) / f"store-{name}", Quantization.of_model(its, None))
            kept = open_store(store, spec)
            found = {
                "the file's weights": log_probabilities(spec, load_dense(open_checkpoint(its, spec)), windows),
                "as kept here": log_probabilities(as_stored(spec, kept), kept, windows),
                "llama.cpp": llamacpp_log_probabilities(file, windows),
            }
            manifest = read_manifest(store)
            bits = f"{8 * file.stat().st_size / kept.n_weights:.2f} -> {matrix_bits(manifest):.2f}"
            print(name, bits, {way: f"{divergence(expected, each):.2g}" for way, each in found.items()}, flush=True)
            for row in imported_types(manifest.source):
                print("   ", row)


def files(model: Path, types: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    import llama_cpp
    import transformers

    first = folder / "F16.gguf"
    write_gguf(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        first,
        lambda _: "F16",
        tokenizer=model,
    )
    yield "F16", first
    for name in types:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = TYPES[name], 1
        file = folder / f"{name}.gguf"
        if llama_cpp.llama_model_quantize(str(first).encode(), str(file).encode(), params):
            raise RuntimeError(f"llama.cpp can't quantize to {name}.")
        yield name, file


def log_probabilities(spec: ModelSpec, weights: ModelWeights, windows: list[list[int]]) -> torch.Tensor:
    executor, found = ReferenceExecutor(spec, weights, WINDOW), []
    for window in windows:
        sequence = executor.cache.open_new()
        logits = executor.logits(Batch.of_sequence(sequence, 0, window), range(len(window)))
        found.append(torch.log_softmax(logits.double(), -1))
        executor.cache.close(sequence)
    return torch.cat(found)


def llamacpp_log_probabilities(file: Path, windows: list[list[int]]) -> torch.Tensor:
    import llama_cpp

    model: Any = llama_cpp.Llama(str(file), n_ctx=512, logits_all=True, verbose=False, n_threads=1)
    found = []
    for window in windows:
        model.reset()
        model.eval(window)
        found.append(torch.log_softmax(torch.tensor(np.array(model.scores[: len(window)])).double(), -1))
    return torch.cat(found)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean over tokens, in nats."""
    return float((expected.exp() * (expected - found)).sum(-1).mean())


if __name__ == "__main__":
    main()
