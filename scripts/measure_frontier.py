"""Measure KL divergence per byte: this engine's 4 to 8 bits, plain and calibrated, GPTQ, AWQ, and llama.cpp's types.

    PYTHONPATH=. python scripts/measure_frontier.py --model MODEL --text HELD_OUT ... --calibrate TEXT ... [--json]

MODEL is a GGUF file or a folder; its dequantized weights count as the model. All weights are compared in fp32, and each
held-out text gives a column. llama.cpp quantizes with an importance matrix: the mean squares of each matrix's inputs on
the same calibration texts. GPTQ and AWQ are our implementations of the papers' methods, for these texts; like their
checkpoints, they keep the vocabulary in fp16.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from published_quantizers import awq, gptq, n_bits
from torch import Tensor

from hetero_ee.config import cache_folder, demo_model_folder
from hetero_ee.evaluation.comparison import Comparison, compared, window_sums
from hetero_ee.hub.gguf.folder import gguf_folder
from hetero_ee.layers.tensors import TensorRole, TensorSpec
from hetero_ee.models.blocks import all_tensors, decoder_blocks
from hetero_ee.quality.bits import ERRORS, dealt_layouts, rounding_costs
from hetero_ee.quality.calibrated import CalibratedMatrices
from hetero_ee.quality.stores import CALIBRATED_TOKENS, measured_windows
from hetero_ee.quality.streamed import Ids, Read, StreamedModel, opened
from hetero_ee.quality.texts import text_windows
from hetero_ee.runtime.kernel_cache import use_kernel_cache
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.compensated import quantize_for_inputs
from hetero_ee.weights.model_weights import is_quantized
from hetero_ee.weights.quantizers import Workers, quantize
from hetero_ee.weights.store.conversion import worker_threads
from hetero_ee.weights.weight import TileWeight

BITS = (4.5, 4.8, 5.0, 5.5, 5.8, 6.5, 8.5)
UNIFORM = {"int5": 5.5, "int6": 7.0}  # for comparison with dealt bits
PUBLISHED = {"GPTQ": gptq, "AWQ": awq}
TYPES = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
# Names in GGUF files of the tensors that multiply the inputs of one matrix of a Llama.
GGUF_NAMES = {
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.output": ("attn_output",),
    "ffn.gate_up": ("ffn_gate", "ffn_up"),
    "ffn.down": ("ffn_down",),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One quantization of the model."""

    name: str
    n_bytes: int
    bits_per_weight: float
    by_text: list[Comparison]


@dataclass(frozen=True, slots=True)
class Rounded:
    """All of the layers' matrices in every layout, by (is calibrated, layout), and the mean squares of their inputs.

    `published` has the values by GPTQ and AWQ.
    """

    tiles: dict[tuple[bool, str], dict[str, TileWeight]]
    published: dict[str, dict[str, Tensor]]
    squares: dict[str, Tensor]
    costs: dict[TensorSpec, float]


def main() -> None:
    arguments = parse_arguments()
    use_kernel_cache(cache_folder())
    folder = gguf_folder(arguments.model) if arguments.model.is_file() else arguments.model
    spec, read = opened(folder)
    tokenizer = Tokenizer.load(folder, spec.vocab_size)
    held_out = [text_windows(tokenizer, [file.read_text()], arguments.tokens) for file in arguments.text]
    texts = [file.read_text() for file in arguments.calibrate]
    windows = text_windows(tokenizer, texts, CALIBRATED_TOKENS)
    rows = list[Row]()
    with worker_threads(arguments.threads) as workers, tempfile.TemporaryDirectory() as temporary:
        n_weights = sum(tensor.n_elements for tensor in all_tensors(decoder_blocks(spec)))
        model = passed(folder, read, held_out, workers)
        rounded = in_every_layout(folder, windows, workers)
        of_llama_cpp = llama_cpp(arguments, rounded.squares, Path(temporary))
        candidates = [*ours(folder, rounded), *others(folder, rounded.published), *of_llama_cpp]
        for name, n_bytes, its_read in candidates:
            other = passed(folder, its_read, held_out, workers)
            sums = window_sums(model, other, [window for each in held_out for window in each])
            by_text, first = list[Comparison](), 0
            for each in held_out:
                by_text.append(compared(sums[first : first + len(each)], 0))
                first += len(each)
            rows.append(Row(name, n_bytes, 8 * n_bytes / n_weights, by_text))
            say(table_row(rows[-1]))
    if arguments.json:
        print(json.dumps({"texts": [file.name for file in arguments.text], "rows": [asdict(row) for row in rows]}))
    else:
        print_table(rows, [file.stem for file in arguments.text])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model_folder())
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out texts")
    parser.add_argument("--calibrate", type=Path, nargs="+", required=True, help="other texts")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each held-out text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def passed(folder: Path, read: Read, texts: Sequence[Sequence[Ids]], workers: Workers) -> StreamedModel:
    """The model with the weights that `read` returns, after all texts have passed its layers."""
    model = StreamedModel(opened(folder)[0], read, [window for each in texts for window in each], workers)
    for block in model.layer_blocks():
        model.pass_block(block, model.weights([block]))
    return model


def in_every_layout(folder: Path, windows: Sequence[Ids], workers: Workers) -> Rounded:
    """Round each of the layers' matrices in each way, as `hetero-ee convert` would."""
    spec, read = opened(folder)
    fit = CalibratedMatrices(StreamedModel(spec, read, windows, workers), workers)
    tiles: dict[tuple[bool, str], dict[str, TileWeight]] = {(way, name): {} for way in (False, True) for name in ERRORS}
    squares, published = dict[str, Tensor](), {name: dict[str, Tensor]() for name in PUBLISHED}
    for tensor in all_tensors(decoder_blocks(spec.in_plain_int4)):
        if tensor.role is TensorRole.MATRIX:
            values, moments = read(tensor).float(), fit.moments(tensor)
            squares[tensor.name] = torch.cat([each.diagonal() for each in moments])
            for name in ERRORS:
                plain = quantize(values, "codebook" if name == "int4" else name, workers)
                tiles[False, name][tensor.name] = plain
                tiles[True, name][tensor.name] = quantize_for_inputs(values, moments, name, workers)
            for name, method in PUBLISHED.items():
                published[name][tensor.name] = method(values, torch.block_diag(*moments))
            say(tensor.name)
    model = StreamedModel(spec.in_plain_int4, read, measured_windows(windows), workers)
    costs = rounding_costs(model, "codebook", workers)
    say(json.dumps({tensor.name: cost for tensor, cost in costs.items()}))
    return Rounded(tiles, published, squares, costs)


def ours(folder: Path, rounded: Rounded) -> Iterator[tuple[str, int, Read]]:
    """Yield a name, the bytes and the weights of each of this engine's stores."""
    spec, read = opened(folder)
    others = [tensor for tensor in all_tensors(decoder_blocks(spec)) if tensor.name not in rounded.squares]
    eight_bit = {each.name: quantize(read(each), "int8") for each in others if is_quantized(each.role)}
    n_others = sum(4 * each.n_elements for each in others if not is_quantized(each.role))
    n_weights = sum(tensor.n_elements for tensor in rounded.costs)
    layouts = {f"{bits} bits": dealt_layouts(rounded.costs, int(bits * n_weights / 8)) for bits in BITS}
    layouts |= {f"{bits} bits, {name} only": dict.fromkeys(rounded.squares, name) for name, bits in UNIFORM.items()}
    for is_calibrated in (True, False):
        for name, chosen in layouts.items():
            matrices = {each: rounded.tiles[is_calibrated, layout][each] for each, layout in chosen.items()} | eight_bit
            n_bytes = n_others + sum(matrix.n_bytes for matrix in matrices.values())
            yield f"{name}{', calibrated' * is_calibrated}", n_bytes, reader(matrices, read)


def others(folder: Path, published: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, int, Read]]:
    """Yield the same of published methods, whose bytes have all other tensors in fp16."""
    spec, read = opened(folder)
    for name, matrices in published.items():
        n_others = sum(each.n_elements for each in all_tensors(decoder_blocks(spec)) if each.name not in matrices)
        bits = sum(n_bits(each, has_zeros=name == "AWQ") for each in matrices.values())
        yield f"{name}, groups of 128 or 64, fp16 vocabulary", bits // 8 + 2 * n_others, dense_reader(matrices, read)


def dense_reader(matrices: dict[str, Tensor], read: Read) -> Read:
    return lambda tensor: matrices[tensor.name] if tensor.name in matrices else read(tensor)


def reader(matrices: dict[str, TileWeight], read: Read) -> Read:
    return lambda tensor: matrices[tensor.name].dequantize() if tensor.name in matrices else read(tensor)


def llama_cpp(
    arguments: argparse.Namespace, squares: dict[str, Tensor], temporary: Path
) -> Iterator[tuple[str, int, Read]]:
    """Yield the same of files that llama.cpp quantizes with an importance matrix, without their metadata's bytes."""
    import gguf

    source = arguments.model if arguments.model.is_file() else floats_file(arguments.model, temporary)
    for kind in TYPES:
        file = temporary / f"{kind}.gguf"
        quantize_by_llama_cpp(source, kind, file, squares)
        n_bytes = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)
        yield f"llama.cpp {kind}", n_bytes, opened(gguf_folder(file))[1]


def floats_file(model: Path, folder: Path) -> Path:
    import transformers

    from tests.gguf_models import write_gguf

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    write_gguf(loaded, folder / "F32.gguf", lambda _: "F32", tokenizer=model)
    return folder / "F32.gguf"


def quantize_by_llama_cpp(source: Path, kind: str, target: Path, squares: dict[str, Tensor]) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread = True, 1
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    entry, columns, entries = llama_cpp.llama_model_imatrix_data, list[Any](), list[Any]()
    for name, values in squares.items():
        _, layer, *rest = name.split(".")
        columns.append((ctypes.c_float * len(values))(*values.tolist()))
        for each in GGUF_NAMES[".".join(rest)]:
            entries.append(entry(f"blk.{layer}.{each}.weight".encode(), columns[-1], len(values)))
    importances = (entry * (len(entries) + 1))(*entries)  # the last one is empty, which ends the list
    params.imatrix = ctypes.cast(importances, ctypes.POINTER(entry))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp can't quantize {source} to {kind}")


def table_row(row: Row) -> str:
    texts = " | ".join(
        f"{each.kl_nats.value:.5f} ± {((each.kl_nats.high or 0) - (each.kl_nats.low or 0)) / 2:.5f}"
        f" | {each.same_top1.value:.3f}"
        for each in row.by_text
    )
    return f"| {row.name} | {row.n_bytes / 1e6:.2f} | {row.bits_per_weight:.2f} | {texts} |"


def print_table(rows: Sequence[Row], texts: Sequence[str]) -> None:
    columns = " | ".join(f"{text}: KL (nats) | same top-1" for text in texts)
    print(f"{rows[0].by_text[0].n_tokens} tokens each\n| | MB | bits a weight | {columns} |")
    print("|---" * (3 + 2 * len(texts)) + "|")
    for row in sorted(rows, key=lambda each: each.n_bytes):
        print(table_row(row))


if __name__ == "__main__":
    main()
