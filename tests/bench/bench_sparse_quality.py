"""What leaving out neurons costs a model: which are left out, how many, and how that is dealt out over the layers.

    python tests/bench/bench_sparse_quality.py --data DIR [--model FOLDER] [--tokens 10000] [--json]

DIR holds the TinyStories excerpts. Thresholds are fitted on the stories of stories_a.txt and stories_c.txt that the
training of the demo model held out; measured is on stories_b.txt, in plain torch with the int4 weights of a
neuron-major store: mean KL divergence of the next token's distribution, dense to sparse, and perplexity. A story's
first tokens use all neurons and count for nothing. Nothing here is by the clock. Prints a table, or with --json one
document.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetero_ee.calibration.stages import Chunk
from hetero_ee.config import cache_folder, demo_model_folder
from hetero_ee.hub.config_file import read_spec
from hetero_ee.kv.batch import FIRST_SPARSE, Batch
from hetero_ee.models.blocks import Block, decoder_blocks
from hetero_ee.models.spec import ModelSpec
from hetero_ee.runtime.executors.reference import ReferenceExecutor
from hetero_ee.sparsity.curves import SHARES, dealt_shares
from hetero_ee.sparsity.fit import SparsityFit, weighted_scores
from hetero_ee.sparsity.recorder import FfnRecorder, Scores
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.model_weights import ModelWeights, as_stored, expanded
from hetero_ee.weights.quantization import Quantization
from hetero_ee.weights.store.library import open_cached
from hetero_ee.weights.weight import Weight

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from stories import read_stories, without_held_out

TARGETS = (0.25, 0.4, 0.5, 0.6, 0.7)
FIT_TEXTS, TEXT, HOLDOUT_EVERY = ("stories_a.txt", "stories_c.txt"), "stories_b.txt", 80
WINDOW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One choice of neurons, measured. target and share: of neurons left out."""

    selection: str
    dealing: str
    target: float
    share: float
    kl_nats: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Log-probabilities behind every counted token, and the mean nats of those that came."""

    distributions: list[Tensor]
    nats: float


class Selection(FfnRecorder):
    """Leaves out neurons whose score is below their layer's threshold, and counts those that are not summed."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, scores: Scores, thresholds: Sequence[float]) -> None:
        super().__init__(spec, weights)
        self._scores, self._thresholds = scores, thresholds
        self.n_zeros = self.n_all = 0

    def neurons(self, x: Tensor, active: Tensor, up: Weight | None, down: Weight) -> Tensor:
        layer = self._layers[id(down)]
        left_out = self._scores(layer, active) < self._thresholds[layer]
        left_out[:FIRST_SPARSE] = False
        return super().neurons(x, active.masked_fill(left_out, 0.0), up, down)

    def watch(self, layer: int, active: Tensor, inner: Tensor, rows: Tensor) -> None:
        self.n_zeros += int((active[FIRST_SPARSE:] == 0).sum())
        self.n_all += active[FIRST_SPARSE:].numel()


class InputSelection(FfnRecorder):
    """FFNs are dense; of what attention's matrices multiply, so large a share of each token is left out, the least."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, target: float) -> None:
        super().__init__(spec, weights)
        names = [block.tensors[part].name for block in attention_blocks(spec) for part in ("qkv", "output")]
        self._sparse = {id(weights.matrices[name]) for name in names}
        self._target = target

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if id(weight) in self._sparse:
            least = torch.quantile(x.abs(), self._target, dim=1, keepdim=True)
            least[:FIRST_SPARSE] = 0.0
            x = x.masked_fill(x.abs() < least, 0.0)
        return super().product(x, weight, bias)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    spec = read_spec(arguments.model)
    tokenizer = Tokenizer.load(arguments.model, spec.vocab_size)
    quantization = Quantization.of_model(arguments.model, None, neuron_major=True)
    _, stored = open_cached(arguments.model, spec, quantization, cache_folder(), threads=1)
    spec, weights = as_stored(spec, stored), expanded(stored)
    _, held_out = without_held_out(read_stories([arguments.data / name for name in FIT_TEXTS]), HOLDOUT_EVERY)
    fitted = chunks_of(tokenizer, held_out, 10**6)
    text = chunks_of(tokenizer, read_stories([arguments.data / TEXT]), arguments.tokens)
    dense = measured(spec, weights, FfnRecorder(spec, weights), text)
    rows = [row for name in selections(spec, weights) for row in rows_of(name, spec, weights, fitted, text, dense)]
    rows += [input_row(target, spec, weights, text, dense) for target in TARGETS]
    fit = SparsityFit(spec, weights, fitted)
    curves = fit.measured(fit.curves())
    document = {
        "schema": 1,
        "n_tokens": sum(len(chunk) - FIRST_SPARSE - 1 for chunk in text),
        "dense_perplexity": math.exp(dense.nats),
        "rows": [asdict(row) for row in rows],
        "shares_at_half": [round(float(share), 3) for share in dealt_shares(curves.errors, 0.5)],
        "errors_at_half": [float(f"{error:.2g}") for error in curves.errors[:, SHARES.index(0.5)]],
        "searched": [asdict(each) for each in curves.measured],
    }
    print(json.dumps(document) if arguments.json else table(document))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the TinyStories excerpts")
    parser.add_argument("--model", type=Path, default=demo_model_folder())
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens of the text to measure on")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def selections(spec: ModelSpec, weights: ModelWeights) -> dict[str, Scores]:
    """Scores by name; random ones are drawn anew for each token."""
    generator = torch.Generator().manual_seed(0)
    return {
        "random": lambda _, active: torch.rand(active.shape, generator=generator),
        "magnitude": lambda _, active: active.abs(),
        "weighted": weighted_scores(spec, weights),
    }


def chunks_of(tokenizer: Tokenizer, stories: list[str], n_tokens: int) -> list[Chunk]:
    """The beginnings of stories, one a chunk, until there are so many tokens."""
    chunks: list[Chunk] = []
    for story in stories:
        chunks.append(tuple(tokenizer.encode(story)[:WINDOW_TOKENS]))
        if sum(map(len, chunks)) >= n_tokens:
            break
    return chunks


def rows_of(
    name: str, spec: ModelSpec, weights: ModelWeights, fitted: list[Chunk], text: list[Chunk], dense: Measured
) -> list[Row]:
    """Of one selection, every target, the same share everywhere and dealt out."""
    scores = selections(spec, weights)[name]
    curves = SparsityFit(spec, weights, fitted, scores).curves()
    rows = []
    for target in TARGETS:
        uniform = [float(np.interp(target, SHARES, row)) for row in curves.thresholds]
        for dealing, thresholds in (("uniform", uniform), ("by error", curves.at(target).per_layer)):
            selection = Selection(spec, weights, scores, thresholds)
            found = measured(spec, weights, selection, text)
            share = selection.n_zeros / selection.n_all
            rows.append(Row(name, dealing, target, share, divergence(dense, found), math.exp(found.nats)))
            print(rows[-1], file=sys.stderr)
    return rows


def input_row(target: float, spec: ModelSpec, weights: ModelWeights, text: list[Chunk], dense: Measured) -> Row:
    """Of attention's inputs; the share is what it is asked for, token by token."""
    found = measured(spec, weights, InputSelection(spec, weights, target), text)
    row = Row("attention's inputs", "uniform", target, target, divergence(dense, found), math.exp(found.nats))
    print(row, file=sys.stderr)
    return row


def attention_blocks(spec: ModelSpec) -> list[Block]:
    return [block for block in decoder_blocks(spec) if block.state is not None]


def divergence(dense: Measured, found: Measured) -> float:
    """Mean nats of a token."""
    pairs = zip(dense.distributions, found.distributions, strict=True)
    return float(torch.cat([(theirs.exp() * (theirs - ours)).sum(1) for theirs, ours in pairs]).mean())


def measured(spec: ModelSpec, weights: ModelWeights, ops: FfnRecorder, text: list[Chunk]) -> Measured:
    executor = ReferenceExecutor(spec, weights, WINDOW_TOKENS, ops)
    distributions, nats = [], []
    for chunk in text:
        executor.cache.open(0)
        logits = executor.logits(Batch.of_sequence(0, 0, list(chunk[:-1])), range(FIRST_SPARSE, len(chunk) - 1))
        executor.cache.close(0)
        distributions.append(torch.log_softmax(logits.double(), -1))
        nats.append(-distributions[-1].gather(1, torch.tensor(chunk[FIRST_SPARSE + 1 :])[:, None]))
    return Measured(distributions, float(torch.cat(nats).mean()))


def table(document: dict) -> str:
    lines = [f"{document['n_tokens']} tokens, dense perplexity {document['dense_perplexity']:.3f}"]
    lines += ["| target | selection | dealt out | left out | KL (nats) | perplexity |", "|---|---|---|---|---|---|"]
    for row in sorted(document["rows"], key=lambda row: row["target"]):
        lines.append(
            f"| {row['target']:.0%} | {row['selection']} | {row['dealing']} | {row['share']:.1%} "
            f"| {row['kl_nats']:.2g} | {row['perplexity']:.3f} |"
        )
    for name in ("shares_at_half", "errors_at_half", "searched"):
        lines.append(f"{name}: {document[name]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
